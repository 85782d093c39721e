"""The workbench: configurations, run directories, experiments, tuning, reports, bundles, cli."""
