"""What ``nufed advise CONFIG`` says: the recommendation, what it rests on, how sure it is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import tomli_w

from nufed.lab.analysis.recommend import (
    LOCAL,
    NO_GAIN,
    NU,
    BoardCheck,
    Gap,
    PilotAdvice,
    PilotRecord,
    Recommendation,
    Tried,
)
from nufed.lab.report.tables import Table

WORDS = {
    LOCAL: "training alone",
    "fedavg-5": "FedAvg, five local steps, then fine-tuning",
    "per-fedavg": "a model trained to be good after ν = 1 step",
    "gmeta-3": "a model trained to be good after ν = 3 steps",
    "gmeta-5": "a model trained to be good after ν = 5 steps",
    "fedrep": "a shared body, a head of one's own",
    "ditto": "a model of one's own beside the shared one",
    "ifca": "several shared models, each agent takes the best",
}


def pilot_table(pilot: PilotRecord, advice: Recommendation) -> Table:
    """Every method of the pilot, the best first."""
    rows = []
    for name, tried in pilot.ran.items():
        behind = advice.behind.get(name)
        rows.append(
            [
                name,
                _score(pilot, tried.score),
                _score(pilot, tried.shared),
                "recommended" if behind is None else _gap(pilot, behind),
                f"{tried.adapt_lr:.2g}" if tried.adapt_lr and tried.steps else "no step",
            ]
        )
    steps = f"{pilot.steps} step{'s' * (pilot.steps != 1)}"
    return Table(["", steps, "before", "behind (± 95 %)", "α at use"], rows)


def start_with(pilot: PilotRecord, advice: Recommendation) -> str:
    """The recommended method as a table of a configuration; of training alone there is none."""
    if advice.method == LOCAL:
        return ""
    table = {"methods": {advice.method: pilot.ran[advice.method].settings}}
    return tomli_w.dumps(table).strip()


def sentences(pilot: PilotRecord, advice: Recommendation, check: BoardCheck) -> list[str]:
    """The recommendation and its reasons, in the order that they are read."""
    return [
        f"Start with {advice.method}: {WORDS[advice.method]}.",
        _how_sure(advice),
        check.sentence,
        _federation(pilot, advice),
        *_nu(pilot, advice),
        *_agents(pilot),
        *_more(pilot, advice),
        _scope(pilot),
        *(f"{tried.method} can't be used here: {tried.failure}." for tried in _failed(pilot)),
    ]


def advice_record(pilot: PilotRecord, advice: Recommendation, check: BoardCheck) -> PilotAdvice:
    """Everything as one record."""
    return PilotAdvice(
        method=advice.method,
        settings=pilot.ran[advice.method].settings,
        near=list(advice.near),
        alike=advice.alike,
        behind={name: (gap.mean, gap.noise) for name, gap in advice.behind.items()},
        board=check,
        text=sentences(pilot, advice, check),
        pilot=pilot,
    )


def _how_sure(advice: Recommendation) -> str:
    if not advice.behind:
        return "No other method was trained in the pilot: this is no comparison."
    if not advice.alike:
        return "In the pilot it is ahead of every other method, each time with 95 % intervals."
    alike = ", ".join(advice.alike)
    text = f"The pilot can't tell it apart from {alike} (95 %)"
    if len(advice.near) > 1:
        text += (
            "; among those within one standard error ranks decided, in the pilot and on the board"
        )
    if advice.agents_needed is not None:
        text += f"; the nearest would be apart with about {advice.agents_needed} scored agents"
    return f"{text}."


def _federation(pilot: PilotRecord, advice: Recommendation) -> str:
    """What training alone and FedAvg with fine-tuning reach."""
    known = [
        f"{words} reaches {_score(pilot, pilot.ran[name].score)}"
        for name, words in ((LOCAL, "training alone"), ("fedavg-5", "FedAvg with fine-tuning"))
        if name in pilot.ran
    ]
    text = ", ".join(known).capitalize().replace("fedavg", "FedAvg") or "Neither was measured"
    alone = advice.behind.get(LOCAL)
    if alone is None or not known:
        return f"{text}."
    if LOCAL not in pilot.comparable:
        return (
            f"{text}, but {pilot.rounds} of {pilot.rounds_configured} rounds are too few to "
            "compare the two: give more --minutes."
        )
    pays = "a federation pays" if alone.sure else "whether a federation pays is not sure"
    return f"{text}: {pays}."


def _nu(pilot: PilotRecord, advice: Recommendation) -> Iterator[str]:
    """Whether ν > 1 pays: in the pilot, and by the theory at most."""
    gain = advice.nu_gain
    if gain is not None:
        more = next(name for name in pilot.ran if NU.get(name, 0) > 1)
        verdict = "not sure"
        if gain.sure:
            verdict = "ν > 1 pays" if gain.mean > 0 else "ν > 1 does not pay"
        amount = _signed(pilot, gain.mean, gain.noise)
        yield f"ν = {NU[more]} gains {amount} over ν = 1 at equal rounds: {verdict}."
    if advice.most is not None:
        small = advice.most < NO_GAIN
        yield (
            f"On quadratics with these curvatures ν = 3 can gain at most {advice.most:.0%} over "
            f"ν = 1{', which is none' if small else ''} (docs/when_nu_pays.md)."
        )


def _agents(pilot: PilotRecord) -> Iterator[str]:
    """How agents differ."""
    for at in pilot.heterogeneity[-1:]:
        values = at.curvatures
        place = "FedAvg's model" if at.model == "fedavg" else "the initial model"
        yield (
            f"At {place}, on {at.agents} agents: γ_G {at.gamma_g:.2g} (mean gradient "
            f"{at.gradient:.2g}), γ_H {at.gamma_h:.2g} (curvature {min(values):.2g} … "
            f"{max(values):.2g}, mean {at.mean_curvature:.2g})"
            f"{'' if pilot.smooth else '; the loss has kinks, which γ_H does not see'}."
        )


def _more(pilot: PilotRecord, advice: Recommendation) -> Iterator[str]:
    """What more agents or data would change."""
    for half in pilot.halved:
        lost = Gap(half.difference or 0.0, half.noise or 0.0)
        loses = _signed(pilot, lost.mean, lost.noise)
        verdict = (
            f"more {half.what} should help" if lost.sure and lost.mean > 0 else "no sure effect"
        )
        yield f"With half of the {half.what} {advice.method} loses {loses}: {verdict}."


def _scope(pilot: PilotRecord) -> str:
    low, middle, high = pilot.samples
    sizes = f"{low}" if low == high else f"{low} to {high} (median {middle:g})"
    who = "agents that took no part in training" if pilot.newcomers else "agents in training"
    left = f" Left out: {'; '.join(pilot.left_out)}." if pilot.left_out else ""
    return (
        f"The pilot trained on {pilot.trained} of {pilot.agents} agents, with {sizes} training "
        f"samples each, for {pilot.rounds} of {pilot.rounds_configured} rounds; it scored "
        f"validation samples of {pilot.scored} {who}, and read no test sample.{left}"
    )


def _failed(pilot: PilotRecord) -> list[Tried]:
    return [tried for tried in pilot.tried if tried.failure is not None]


def _score(pilot: PilotRecord, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if pilot.measure == "accuracy" else f"{value:.3g}"


def _gap(pilot: PilotRecord, gap: Gap) -> str:
    return _signed(pilot, gap.mean, gap.noise)


def _signed(pilot: PilotRecord, value: float, noise: float) -> str:
    """A difference with its 95 % interval."""
    if pilot.measure == "accuracy":
        text = f"{100 * value:.1f} ± {196 * noise:.1f} points"
    else:
        text = f"{value:.2g} ± {1.96 * noise:.2g}"
    return text.replace("-", "−")
