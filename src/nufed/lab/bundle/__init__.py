"""Bundles: a meta-model in a file, adapted to a user's data in one call."""

from nufed.lab.bundle.adapting import Adapted, Prediction, Report, Score, load_adapted
from nufed.lab.bundle.bundle import Bundle, load_bundle

__all__ = ["Adapted", "Bundle", "Prediction", "Report", "Score", "load_adapted", "load_bundle"]
