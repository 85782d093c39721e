"""The metrics that every engine records, one line per round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nufed.algorithms.protocol import Algorithm, State
from nufed.evaluate import AgentScores, Evaluation, Measure, summarise
from nufed.server import Progress


def round_line(algorithm: Algorithm, progress: Progress) -> dict[str, Any]:
    """A round's cohort, rejected updates and cost, as a line of metrics.jsonl."""
    agents, sent = len(progress.cohort), algorithm.sent_in(progress.round)
    update_bytes = progress.update_bytes
    if update_bytes is None:
        update_bytes = _bytes(progress.server, sent)
    more: dict[str, Any] = {"dropped": progress.dropped} if progress.dropped else {}
    if progress.dropped or progress.rejected:
        more["taken"] = progress.taken
    if progress.attempts > 1:
        more["attempts"] = progress.attempts
    if progress.update_norm is not None:
        more["update_norm"] = progress.update_norm
    if progress.medians:
        more["median_norms"] = dict(progress.medians)
    return {
        "round": progress.round,
        "cohort": progress.cohort,
        "rejected": [{"agent": r.agent, "reason": r.reason} for r in progress.rejected],
        "gradients": progress.cost.gradients,
        "hvps": progress.cost.hvps,
        "bytes_down": agents * _bytes(progress.server, algorithm.receives),
        "bytes_up": (agents - len(progress.dropped)) * update_bytes,
        **more,
    }


def _bytes(server: State, names: Sequence[str]) -> int:
    return sum(server[name].nbytes for name in names)


def evaluation_line(evaluation: Evaluation, steps: int, measure: Measure) -> dict[str, Any]:
    """An evaluation's entries in a round's line: scores as trained and with chosen step sizes."""
    line: dict[str, Any] = {
        "evaluation": by_group(evaluation.as_trained, steps, measure),
        "evaluation_gradients": evaluation.gradients,
        "evaluation_hvps": evaluation.hvps,
    }
    if evaluation.chosen is not None and evaluation.step_sizes is not None:
        line["evaluation_chosen"] = by_group(evaluation.chosen, steps, measure)
        line["scales"] = [own.scale for own in evaluation.step_sizes.chosen]
    return line


def by_group(
    scores: Sequence[AgentScores], steps: int, measure: Measure
) -> dict[str, dict[str, Any]]:
    """Means after 0, 1, … fine-tuning steps, over agents seen in training and over the others.

    ``global_score`` is the mean of the global model, if there is one.
    """
    groups: dict[str, dict[str, Any]] = {}
    for group in ("seen", "unseen"):
        chosen = [s for s in scores if s.seen == (group == "seen")]
        if chosen:
            means = [summarise(chosen, step, measure) for step in range(steps + 1)]
            groups[group] = {"score": [m.mean for m in means], "loss": [m.loss for m in means]}
            if chosen[0].global_score is not None:
                groups[group]["global_score"] = means[0].global_mean
            if chosen[0].balanced:
                groups[group]["balanced"] = [m.balanced for m in means]
                groups[group]["minority"] = [m.minority for m in means]
    return groups
