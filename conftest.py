"""What is not looked at by pytest where the extra `flower` is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["src/nufed/flower/*", "tests/flower/in_*.py"]
