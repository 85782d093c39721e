"""Writes a run for other tools: a finished one, or, as an observer, while it trains."""

from nufed.export.targets import TARGETS, Chosen, Target, export

__all__ = ["TARGETS", "Chosen", "Target", "export"]
