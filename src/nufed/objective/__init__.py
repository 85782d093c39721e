"""A module and a loss as functions of one flat parameter vector, and their fast forms."""

from nufed.objective.batch import (
    AnyBatch as AnyBatch,
    AnyObjective as AnyObjective,
    Batch as Batch,
    Inputs as Inputs,
    Loss as Loss,
)
from nufed.objective.objective import Objective as Objective
