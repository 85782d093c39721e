"""Payloads of evaluation: sites' scores, and which part and step sizes to score, all validated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from flwr.app import MetricRecord, RecordDict

from nufed.data import ScoredOn
from nufed.errors import shown
from nufed.evaluate import GROUPS, AgentScores
from nufed.flower.app.payload import (
    ABOUT,
    SCORES,
    PayloadError,
    check_agent,
    check_keys,
    content,
    get_record,
    read_about,
    read_int,
)
from nufed.server.checks import MOST_SAMPLES

BY_CLASS = ("balanced", "minority", "majority")
GLOBAL = "global"  # loss and score of the global model, if there is one
GROUP_LOSS = "group_loss"  # of groups of validation samples, if the site sends it
MAX_SCALES = 64  # step sizes per request


def scores_content(
    by_scale: Sequence[AgentScores], majority: AgentScores | None, round: int
) -> RecordDict:
    """An agent's scores as plain numbers, with those of always predicting its majority class.

    ``by_scale`` are its scores for every requested scale of the step size, sent concatenated.
    """
    scores = by_scale[0]
    records = content(
        agent=scores.agent,
        round=round,
        train_samples=scores.train_samples,
        test_samples=scores.test_samples,
        minority_samples=scores.minority_samples,
        personal_gradients=scores.personal_gradients,
        personal_hvps=scores.personal_hvps,
        newcomer=scores.newcomer,
    )
    names = ("loss", "score", *(("balanced", "minority") if scores.balanced else ()))
    lists = {name: [x for own in by_scale for x in getattr(own, name)] for name in names}
    if scores.group_loss:
        lists[GROUP_LOSS] = [x for own in by_scale for losses in own.group_loss for x in losses]
    if scores.global_score is not None and scores.global_loss is not None:
        lists[GLOBAL] = [scores.global_loss, scores.global_score]
    if majority is not None:
        first = (majority.score[0], majority.balanced[0], majority.minority[0])
        lists["majority"] = list(first)
    records[SCORES] = MetricRecord(cast(Any, lists))
    return records


def read_scores(
    records: Mapping[str, object],
    agent: int,
    round: int,
    *,
    name: str,
    seen: bool,
    steps: int,
    scales: int,
    by_class: bool,
    has_global: bool,
    diverged: bool,
) -> tuple[list[AgentScores], AgentScores | None]:
    """An agent's validated scores by scale, and those of its majority class.

    With ``by_class`` they are accuracies, also per class; without, any numbers. They must be finite
    unless ``diverged`` is set. ``has_global`` says whether there is a global model.
    """
    check_keys(records, ABOUT, SCORES)
    claimed, of, train, test, minority, gradients, hvps, newcomer = read_about(
        records,
        "agent",
        "round",
        "train_samples",
        "test_samples",
        "minority_samples",
        "personal_gradients",
        "personal_hvps",
        "newcomer",
    )
    check_agent(claimed, agent)
    if read_int(of, "round", 10**9) != round:
        raise PayloadError(f"its scores are of round {of}")
    if not isinstance(newcomer, bool):
        raise PayloadError(f"newcomer is {shown(newcomer)}, not true or false")
    lists = get_record(records, SCORES, MetricRecord)
    keys = {"loss", "score", *(BY_CLASS if by_class else ()), *([GLOBAL] if has_global else ())}
    if lists.keys() - {GROUP_LOSS} != keys:
        raise PayloadError(f"its scores have keys {shown(sorted(lists))} instead of {sorted(keys)}")
    test_samples = read_int(test, "test_samples", MOST_SAMPLES, least=1)
    most = test_samples if by_class else 0
    minority_samples = read_int(minority, "minority_samples", most)
    none, length = minority_samples == 0, scales * (steps + 1)

    def read(key: str, share: bool, none: bool = False) -> list[tuple[float, ...]]:
        """The numbers after 0, 1, … steps, by scale."""
        numbers = _numbers(lists[key], key, length, share=share, none=none, diverged=diverged)
        return [numbers[at : at + steps + 1] for at in range(0, length, steps + 1)]

    by_steps: dict[str, list[tuple[float, ...]]] = {
        "loss": read("loss", share=False),
        "score": read("score", share=by_class),
        "balanced": read("balanced", share=True) if by_class else [()] * scales,
        "minority": read("minority", share=True, none=none) if by_class else [()] * scales,
    }
    groups = min(test_samples, GROUPS)
    losses: tuple[float, ...] = ()
    if GROUP_LOSS in lists:
        losses = _numbers(lists[GROUP_LOSS], GROUP_LOSS, length * groups, diverged=diverged)
    by_group = [losses[at : at + groups] for at in range(0, len(losses), groups)]
    train_samples = read_int(train, "train_samples", MOST_SAMPLES, least=1)
    shared: list[float | None] = [None, None]
    if has_global:
        both = lists[GLOBAL] if isinstance(lists[GLOBAL], list) else []
        shared = [
            *_numbers(both[:1], GLOBAL, 1, diverged=diverged),
            *_numbers(both[1:], GLOBAL, 1, share=by_class, diverged=diverged),
        ]
    scores = [
        AgentScores(
            agent=agent,
            name=name,
            seen=seen,
            train_samples=train_samples,
            test_samples=test_samples,
            minority_samples=minority_samples,
            loss=loss,
            score=score,
            global_loss=shared[0],
            global_score=shared[1],
            balanced=balanced,
            minority=on_minority,
            personal_gradients=read_int(gradients, "personal_gradients", 10**9),
            personal_hvps=read_int(hvps, "personal_hvps", 10**9),
            newcomer=newcomer,
            group_loss=tuple(by_group[at : at + steps + 1]),
        )
        for at, loss, score, balanced, on_minority in zip(
            range(0, length, steps + 1), *by_steps.values(), strict=True
        )
    ]
    if not by_class:
        return scores, None
    null = lists["majority"]
    first, last = (null[:2], null[2:]) if isinstance(null, list) else (null, null)
    constants = (
        *_numbers(first, "majority", 2, share=True),
        *_numbers(last, "majority", 1, share=True, none=none),
    )
    score, balanced, on_minority = ((number,) * (steps + 1) for number in constants)
    loss = (math.nan,) * (steps + 1)
    constant = {
        "loss": loss,
        "score": score,
        "global_loss": None,
        "global_score": None,
        "balanced": balanced,
        "minority": on_minority,
        "personal_gradients": 0,
        "personal_hvps": 0,
        "newcomer": False,
        "group_loss": (),
    }
    return scores, replace(scores[0], **cast(Any, constant))


def read_scales(scales: object) -> list[float]:
    """The requested scales of the step size."""
    ok = isinstance(scales, list) and 1 <= len(scales) <= MAX_SCALES
    if not ok or not all(isinstance(s, float) and 0 <= s < math.inf for s in cast(Any, scales)):
        raise PayloadError(f"scales is {shown(scales)}, not up to {MAX_SCALES} numbers, 0 or more")
    return cast(list[float], scales)


def read_part(part: object) -> ScoredOn:
    """The requested part of the samples."""
    if part not in get_args(ScoredOn):
        raise PayloadError(f"part is {shown(part)}, not one of {get_args(ScoredOn)}")
    return cast(ScoredOn, part)


def _numbers(
    values: object,
    name: str,
    length: int,
    *,
    share: bool = False,
    none: bool = False,
    diverged: bool = False,
) -> tuple[float, ...]:
    """``length`` finite numbers; a ``share`` is in 0 … 1, or NaN without samples (``none``).

    With ``diverged`` they may be non-finite.
    """
    if not isinstance(values, list) or len(values) != length:
        raise PayloadError(f"{name!r} is not a list of {length} numbers")
    if none:
        return (math.nan,) * length
    if not all(isinstance(v, float) and (diverged or math.isfinite(v)) for v in values):
        raise PayloadError(f"{name!r} is {shown(values)}: every number must be finite")
    if share and not all(0 <= v <= 1 for v in values if math.isfinite(v)):
        raise PayloadError(f"{name!r} is {shown(values)}: every number must be in 0 … 1")
    return tuple(values)
