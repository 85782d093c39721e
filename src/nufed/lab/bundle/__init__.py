"""Bundles: a meta-model in a file, adapted to a user's data in one call."""

from nufed.lab.bundle.adapting import (
    Adapted as Adapted,
    Prediction as Prediction,
    Report as Report,
    Score as Score,
    load_adapted as load_adapted,
)
from nufed.lab.bundle.bundle import Bundle as Bundle, load_bundle as load_bundle
