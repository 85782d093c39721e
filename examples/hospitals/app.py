"""The apps that Flower runs at the server and at every site. No changes needed here."""

from pathlib import Path

from my_data import load

from nufed.flower import App

federation = App(Path(__file__).with_name("federation.toml"), load)
