"""From meta-model to a person's own: bundles, adaptation in one call, models to keep."""

from nufed.bundle.adapting import Report, Score
from nufed.bundle.bundle import Bundle, load_bundle
from nufed.bundle.personal import Adapted, Prediction, load_adapted

__all__ = ["Adapted", "Bundle", "Prediction", "Report", "Score", "load_adapted", "load_bundle"]
