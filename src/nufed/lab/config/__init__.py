"""A run's configuration: schema, presets, overrides, and the objects built from it."""

from nufed.lab.config.load import load_config, presets
from nufed.lab.config.schema import Config

__all__ = ["Config", "load_config", "presets"]
