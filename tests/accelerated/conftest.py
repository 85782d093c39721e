"""Registers the test accelerator, in a process that ``tests/test_accelerator.py`` starts."""

import os

if os.environ.get("NUFED_TEST_ACCELERATOR"):
    import accelerator  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
