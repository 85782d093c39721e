"""The command line: parsing and printing only."""

from nufed.lab.cli.commands import app as app, main as main
