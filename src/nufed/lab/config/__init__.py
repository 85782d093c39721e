"""A run's configuration: schema, presets, overrides, and the objects built from it."""

from nufed.lab.config.load import load_config as load_config, presets as presets
from nufed.lab.config.schema import Config as Config
