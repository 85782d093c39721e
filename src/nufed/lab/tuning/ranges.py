"""What is searched of each method: the settings that ``[tune]`` names, or those that declare it.

The work of training with some settings is predicted from a few measured agent updates, in
gradients: a Hessian-vector product counts as two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nufed.algorithms.protocol import AgentResult, Algorithm, Context
from nufed.errors import InputError, NufedError, shown
from nufed.lab.config import Config
from nufed.lab.config.describe import name_of
from nufed.lab.experiment.setup import Setup
from nufed.lab.runs.tuning_record import HVP_WORK, Range
from nufed.lab.tuning.trials import setup_of
from nufed.registry import suggest
from nufed.server import cohort_size, initial_server, to_send
from nufed.settings import Field, Search, settings_of
from nufed.simulation import DirectEngine

DECADES = 1e3  # width of a range whose upper end comes from the smoothness


@dataclass(frozen=True)
class Smoothness:
    """The estimated smoothness L of the loss, and where it comes from."""

    value: float
    source: str

    def range_of(self, name: str) -> Range:
        """Step sizes up to 2/L, above which gradient descent on a quadratic diverges."""
        high = float(f"{2 / self.value:.3g}")
        origin = f"upper end 2/L, with L = {self.value:.3g} of {self.source}"
        return Range(setting=name, low=high / DECADES, high=high, log=True, origin=origin)


Matters: TypeAlias = Callable[[str, str, Any], bool]
"""Whether a value of a method's setting changes its training or what evaluation does not choose."""


def ranges_of_methods(
    config: Config,
    algorithms: Mapping[str, Algorithm],
    matters: Matters,
    smoothness: Smoothness | None = None,
) -> dict[str, tuple[list[Range], list[str]]]:
    """What is searched of each method, and notes on settings that are not.

    Args:
        config: with ``[tune]``.
        algorithms: the methods as configured.
        matters: tried on settings with a declared range.
        smoothness: upper end of declared ranges of step sizes, if it is known.
    """
    named, by_method = config.tune.ranges, config.tune.methods
    for method in by_method:
        if method not in algorithms:
            raise InputError(
                f"tune.methods.{method}: must be one of {', '.join(algorithms)}, the methods of "
                f"this configuration{suggest(method, list(algorithms))}"
            )
    active = {name: dict(active_settings(each)) for name, each in algorithms.items()}
    for key in named:
        if not any(key in settings for settings in active.values()):
            every = sorted({key for settings in active.values() for key in settings})
            raise _no_setting(f"tune.ranges.{key}", ", ".join(active), every, key)
    searched = {}
    for method, settings in active.items():
        given = {key: ("ranges", value) for key, value in named.items() if key in settings}
        of_method = by_method.get(method, {})
        given |= {key: (f"methods.{method}", value) for key, value in of_method.items()}
        if given:
            ranges = [
                _given(f"tune.{table}.{key}", key, value, method, settings, smoothness)
                for key, (table, value) in given.items()
            ]
            searched[method] = ranges, list[str]()
        else:
            searched[method] = _declared(method, settings, matters, smoothness)
    return searched


def configured(algorithm: Algorithm) -> dict[str, Any]:
    """The values of all settings that can be searched, as a configuration writes them."""
    return {key: value for key, (_, value) in active_settings(algorithm)}


def active_settings(thing: Any) -> Iterator[tuple[str, tuple[Field, Any]]]:
    """The settings of an object and of those that it holds, with their values."""
    for field in settings_of(type(thing)):
        value, choices = getattr(thing, field.name), field.setting.choices
        if choices is not None:
            yield field.name, (field, name_of(type(value), choices))
            yield from active_settings(value) if dataclasses.is_dataclass(value) else ()
        elif isinstance(value, bool | int | float | str):
            yield field.name, (field, value)


def _declared(
    method: str,
    settings: Mapping[str, tuple[Field, Any]],
    matters: Matters,
    smoothness: Smoothness | None,
) -> tuple[list[Range], list[str]]:
    ranges, notes = [], []
    for key, (field, _) in settings.items():
        search = field.setting.search
        if search is None:
            continue
        declared = _of_search(field, search, smoothness)
        if matters(method, key, declared.at(0.25)) or matters(method, key, declared.at(0.75)):
            ranges.append(declared)
        else:
            notes.append(
                f"{key} is not searched: the training of {method} does not depend on it, and the "
                "step size of fine-tuning is chosen at every evaluation"
            )
    return ranges, notes


def _of_search(field: Field, search: Search, smoothness: Smoothness | None) -> Range:
    if search.step_size and smoothness is not None:
        return smoothness.range_of(field.name)
    log = search.low > 0 and not field.setting.is_share
    return Range(setting=field.name, low=search.low, high=search.high, log=log)


def _given(
    where: str,
    key: str,
    value: Any,
    method: str,
    settings: Mapping[str, tuple[Field, Any]],
    smoothness: Smoothness | None,
) -> Range:
    """The range that a key of ``[tune]`` gives."""
    if key not in settings:
        raise _no_setting(where, method, sorted(settings), key)
    field, _ = settings[key]
    search = field.setting.search
    if value == "auto" and search is not None:
        return _of_search(field, search, smoothness)
    if not isinstance(value, list) or not value:
        what = "is empty" if value == [] else "must be [low, high] or a list of choices"
        auto = ', or "auto"' * (search is not None)
        raise InputError(f"{where} = {shown(value)}: {what}; for example [0.01, 1]{auto}")
    numbers = [v for v in value if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(value) == 2 == len(numbers):
        return _interval(where, field, *numbers)
    for each in value:
        _check(where, field, each)
    if len(value) < 2 or any(v in value[:place] for place, v in enumerate(value)):
        raise InputError(
            f"{where} = {shown(value)}: choices must be at least two different values; a single "
            f"one is set as methods.{method}.{key}"
        )
    return Range(setting=key, choices=value, origin="[tune]")


def _interval(where: str, field: Field, low: float, high: float) -> Range:
    for end in (low, high):
        _check(where, field, end)
    if low >= high:
        what = "is empty" if low == high else "is reversed"
        raise InputError(
            f"{where} = {shown([low, high])}: the range {what}; write [low, high] with low below "
            "high"
        )
    log = low > 0 and not field.setting.is_share
    whole = float not in field.kinds
    return Range(setting=field.name, low=low, high=high, log=log, whole=whole, origin="[tune]")


def _check(where: str, field: Field, value: Any) -> None:
    choices = field.setting.choices
    if choices is not None and not (isinstance(value, str) and value in choices):
        raise InputError(f"{where}: {shown(value)} must be one of {', '.join(choices)}")
    if choices is None:
        try:
            field.check(value)
        except InputError:
            raise InputError(
                f"{where}: {shown(value)} is outside the setting's bounds, which are: "
                f"{field.allowed()}"
            ) from None


def _no_setting(where: str, who: str, known: list[str], key: str) -> InputError:
    return InputError(
        f"{where}: not a setting of {who}; these are {', '.join(known)}{suggest(key, known)}"
    )


class Predictor:
    """Predicts the work of a round of each method, for any settings.

    It is measured at the agent with the median number of samples, in the first, the middle and the
    last round (some methods have phases), once for all settings that differ in real numbers only.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._known: dict[tuple[Any, ...], float] = {}

    def __call__(self, method: str, settings: Mapping[str, Any]) -> float:
        """The predicted work of a round of the run; a method's own rounds count in proportion."""
        whole = sorted((k, v) for k, v in settings.items() if not isinstance(v, float))
        key = (method, *whole)
        if key not in self._known:
            try:
                algorithm = setup_of(self._setup, method, settings).algorithms[method]
                config = self._setup.config
                rounds = config.rounds_of(method)
                self._known[key] = self._measured(algorithm, rounds) * (rounds / config.rounds)
            except NufedError:  # the trial fails for the same reason, and costs nothing
                return 0.0
        return self._known[key]

    def _measured(self, algorithm: Algorithm, rounds: int) -> float:
        config = self._setup.config
        seen = len(self._setup.federations[config.seeds[0]].split.seen)
        some = sorted({1, (rounds + 1) // 2, rounds})
        costs = [agent_update(self._setup, algorithm, k).cost for k in some]
        work = sum(cost.gradients + HVP_WORK * cost.hvps for cost in costs) / len(some)
        return cohort_size(seen, config.participation) * work


def agent_update(setup: Setup, algorithm: Algorithm, round: int) -> AgentResult:
    """What the agent with the median number of samples does in a round, from the initial model."""
    config, seed = setup.config, setup.config.seeds[0]
    objective, federation = setup.objectives[seed], setup.federations[seed]
    split = federation.split
    by_samples = sorted(split.seen, key=lambda agent: (len(split.train[agent]), agent))
    agent = by_samples[len(by_samples) // 2]
    received = to_send(algorithm, initial_server(algorithm, objective, objective.initial()))
    state = algorithm.agent_init(objective, received)
    context = Context(round, len(split.seen), cohort_size(len(split.seen), config.participation))
    engine = DirectEngine(objective, federation, seed)
    return engine.agent_updates(algorithm, received, {agent: state}, context)[agent]


def matters(setup: Setup, method: str, key: str, value: Any) -> bool:
    """Whether a setting has an effect beyond the step size that evaluation chooses.

    It has none if it is the step size of fine-tuning and an agent's update has the same bits with
    another value, in the last round (earlier phases may not use it).
    """
    config, before = setup.config, setup.algorithms[method]
    if config.eval_lr == "as_trained":
        return True
    after = setup_of(setup, method, {key: value}).algorithms[method]
    if after.adaptation.lr == before.adaptation.lr:
        return True
    last = config.rounds_of(method)
    a, b = (agent_update(setup, algorithm, last) for algorithm in (before, after))
    return not all(
        torch.equal(x[name], y[name])
        for x, y in ((a.vectors, b.vectors), (a.state, b.state))
        for name in x
    )
