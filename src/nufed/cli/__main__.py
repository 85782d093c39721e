"""``python -m nufed.cli``."""

from nufed.cli import main

main()
