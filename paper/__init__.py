"""The paper's experiments, from training to docs/results.md: `python -m paper`."""
