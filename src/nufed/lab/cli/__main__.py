"""``python -m nufed.lab.cli``."""

from nufed.lab.cli import main

main()
