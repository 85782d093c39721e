"""Bundles: a meta-model in a file, adapted to a user's data in one call."""

from nufed.bundle.adapted import Adapted, Prediction, load_adapted
from nufed.bundle.adapting import Report, Score
from nufed.bundle.bundle import Bundle, load_bundle

__all__ = ["Adapted", "Bundle", "Prediction", "Report", "Score", "load_adapted", "load_bundle"]
