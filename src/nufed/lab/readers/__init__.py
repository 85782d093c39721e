"""Data as people have it: files of tables, arrays and images, and data sets by name."""
