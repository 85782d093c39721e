"""The command line."""

from nufed.cli.commands import app, main

__all__ = ["app", "main"]
