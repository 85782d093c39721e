"""The result of an evaluation at the sites."""

from __future__ import annotations

from dataclasses import dataclass

from nufed.errors import UpdateError
from nufed.evaluate import AgentScores, Evaluation


@dataclass(frozen=True)
class Outcome:
    """Every site's scores of a model; ``missing`` are the sites without usable scores, and why.

    ``majority`` are the scores of always predicting a site's most frequent class (classification).
    """

    evaluation: Evaluation
    missing: tuple[UpdateError, ...] = ()
    majority: tuple[AgentScores, ...] = ()

    @property
    def scores(self) -> list[AgentScores]:
        """With the step size of fine-tuning as trained."""
        return self.evaluation.as_trained
