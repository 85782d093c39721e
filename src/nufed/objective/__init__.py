"""A module and a loss as functions of one flat parameter vector, and their fast forms."""

from nufed.objective.batch import AnyBatch, AnyObjective, Batch, Inputs, Loss
from nufed.objective.objective import Objective

__all__ = ["AnyBatch", "AnyObjective", "Batch", "Inputs", "Loss", "Objective"]
