"""The command line: parsing and printing only."""

from nufed.lab.cli.commands import app, main

__all__ = ["app", "main"]
