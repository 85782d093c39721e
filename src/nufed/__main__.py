"""``python -m nufed``: the command line, where its script is not on the path."""

from nufed.lab.cli import main

main()
