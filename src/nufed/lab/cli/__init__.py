"""The command line."""

from nufed.lab.cli.commands import app, main

__all__ = ["app", "main"]
