"""A run's configuration: schema, presets, overrides, and the objects built from it."""

from nufed.config.load import load_config, presets
from nufed.config.schema import Config

__all__ = ["Config", "load_config", "presets"]
