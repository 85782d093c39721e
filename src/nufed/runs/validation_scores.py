"""Validation scores by round: when training stops early, and which round's model is kept.

Scores are means over agents seen in training on their validation samples, of the personal model
after the number of fine-tuning steps that results show. Test samples decide nothing. The decisions
are functions of the recorded scores, so that a resumed training takes the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from nufed.runs.records import MetricsLine


@dataclass
class ValidationScores:
    """The scores of the evaluated rounds so far, ascending.

    Args:
        higher_is_better: of the run's measure.
        patience: evaluations without a better score after which training stops; None: never.
        keeps_best: whether the model of the best round is kept; else the last one.

    >>> scores = ValidationScores(True, patience=2)
    >>> for round, score in [(0, 0.1), (10, 0.7), (20, 0.6), (30, 0.7)]:
    ...     scores.add(round, score)
    >>> scores.best(), scores.best(5), scores.stops_at(20), scores.stops_at(30)
    (10, 0, False, True)
    """

    higher_is_better: bool
    patience: int | None = None
    keeps_best: bool = False
    scores: list[tuple[int, float]] = field(default_factory=list)

    def restore(self, lines: Iterable[MetricsLine]) -> None:
        """Take the scores of the metrics that a training resumes from."""
        found = ((line.round, line.validation_score) for line in lines)
        self.scores = [(round, score) for round, score in found if score is not None]

    def add(self, round: int, score: float) -> None:
        """Add the score of a round, unless training resumed after it and has it already."""
        if not self.scores or self.scores[-1][0] < round:
            self.scores.append((round, score))

    def best(self, until: int | None = None) -> int | None:
        """The first round with the best score, among those until a round; None without scores.

        A score that is not finite is worse than all others.
        """
        found = [(k, score) for k, score in self.scores if until is None or k <= until]
        return max(found, key=lambda each: self._rank(each[1]))[0] if found else None

    def stops_at(self, round: int) -> bool:
        """Whether training stops after this round."""
        if self.patience is None or not self.scores or self.scores[-1][0] != round:
            return False
        best = self.best()
        return sum(k > best for k, _ in self.scores if best is not None) >= self.patience

    def keeps(self, round: int) -> int | None:
        """The round whose checkpoint is kept for one of ``round``: the best until then, or None."""
        return self.best(round) if self.keeps_best else None

    def _rank(self, score: float) -> float:
        if not math.isfinite(score):
            return -math.inf
        return score if self.higher_is_better else -score
