"""Analysis of finished runs: estimated constants, bounds, advice."""
