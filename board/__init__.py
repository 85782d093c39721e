"""The board: every method, tuned, on every problem (`make board`)."""
