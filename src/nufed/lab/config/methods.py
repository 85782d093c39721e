"""``[method]`` and ``[methods.NAME]``: which algorithms are run, with which settings.

Their keys are ``algorithm``, ``rounds``, ``eval_steps`` and the settings of the algorithm, which
only its class defines (:mod:`nufed.settings`). A setting that holds an object (an aggregation
rule, a curvature) is written as the name of its class, and the settings of that class are further
keys::

    [method]                     # what all methods share
    meta_lr = 0.1

    [methods.robust]
    algorithm = "gmeta"
    aggregation = "trimmed"
    trim = 0.1

    [methods.ditto]              # named after its algorithm
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from nufed.algorithms import ALGORITHMS
from nufed.algorithms.protocol import AgentContext, AgentResult, Algorithm, Notes, State
from nufed.errors import InputError, in_short, require, shown
from nufed.lab.config.describe import (
    OWN,
    Name,
    every_setting,
    fields_of,
    known_settings,
    name_of,
    optional,
    suggest_key,
)
from nufed.objective import AnyObjective
from nufed.registry import Registry, closest, is_code, suggest
from nufed.settings import Field as SettingField, explicit_settings, settings_of


@dataclass(frozen=True)
class GivenInPython(Algorithm):
    """An algorithm of which only the settings are known."""

    settings: Mapping[str, Any]

    notes: ClassVar[Notes] = Notes(
        newcomer="does what its class defines, which was given in Python",
        settings=lambda algorithm: {
            "algorithm": "given in Python",
            **{key: str(value) for key, value in algorithm.settings.items()},
        },
    )

    def __getattr__(self, name: str) -> Any:
        """A setting, as the algorithm itself would give it."""
        if name.startswith("_") or name not in self.settings:
            raise AttributeError(name)
        return self.settings[name]

    @property
    def batch_size(self) -> int:
        return int(self.settings.get("batch_size", 1))

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        raise InputError("this method was given in Python: pass its algorithm again (methods=…)")

    def shipped(self, objective: AnyObjective, received: State) -> None:
        return None


DEFAULT = "gmeta"
AUTO = "auto"  # a step size that is measured on the problem before training


@dataclass(frozen=True)
class Known:
    """What is known of a run when its methods are made, for defaults that depend on it.

    Args:
        rounds: of the run.
        curvature: κ, the largest curvature along its first gradients.
        looks: whether κ will be known only later: what depends on it is then recorded as "auto".
    """

    rounds: int | None = None
    curvature: float | None = None
    looks: bool = False


UNKNOWN = Known()


class MethodConfig(BaseModel):
    """One table of settings, without defaults. Extra keys are the algorithm's."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    algorithm: str | None = optional(
        None,
        "an algorithm by name, or package.module:Class; without it a method runs the "
        f"one that it is named after, and {DEFAULT} where there are no methods",
    )
    rounds: Annotated[int, Field(ge=1)] | None = optional(
        None,
        "communication rounds of this method alone, so that methods can be compared at equal "
        "gradients; those of the run. Not in [method]",
    )
    eval_steps: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = optional(
        None, "list of numbers of fine-tuning steps to show; the algorithm's or the run's"
    )

    @model_validator(mode="before")
    @classmethod
    def _sorted(cls, given: Any) -> Any:
        """Sort keys, so that the fingerprint does not depend on their order."""
        if not isinstance(given, Mapping):
            return given
        return {key: given[key] for key in sorted(given, key=str)}

    if TYPE_CHECKING:  # the algorithm's settings are attributes, too

        def __getattr__(self, name: str) -> Any: ...

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm's settings that are set."""
        return dict(self.model_extra or {})

    def without_auto(self, keys: Collection[str]) -> MethodConfig:
        """A copy without these keys where their value is "auto"."""
        given = self.model_dump()
        return MethodConfig(**{k: v for k, v in given.items() if k not in keys or v != AUTO})

    def code(self) -> dict[str, str]:
        """Every ``package.module:Class`` that the table names to be imported, by its key."""
        if self.algorithm == OWN:
            return {}
        return {key: value for key, value in self.model_dump().items() if is_code(value)}


@dataclass(frozen=True)
class Method:
    """A method of a run: its algorithm, and the defaults of its keys."""

    algorithm: Algorithm
    defaults: Mapping[str, Any]


def make_methods(
    shared: MethodConfig,
    methods: Mapping[str, MethodConfig],
    given: Mapping[str, Algorithm] | None = None,
    recorded: bool = True,
    problem: Known = UNKNOWN,
) -> dict[str, Method]:
    """The methods of a run by name; a method's own settings override the shared ones.

    Args:
        shared: ``[method]``.
        methods: ``[methods.NAME]`` by name; without any, ``[method]`` is the only one.
        given: algorithms that were given in Python, by name.
        recorded: with ``given``: whether ``shared`` may hold defaults of other methods.
        problem: what is known of the run, for defaults that depend on it.
    """
    name = DEFAULT if shared.algorithm is None else shared.algorithm
    if name != OWN:
        ALGORITHMS.find("method.algorithm", name)  # validate it even if no method uses it
    listed = methods or {name.rpartition(":")[2]: MethodConfig()}
    made = {
        name: _Tables(name, shared, table, problem).method((given or {}).get(name))
        for name, table in listed.items()
    }
    unknown = any(isinstance(m.algorithm, GivenInPython) for m in made.values())
    if not unknown and not (given and recorded):
        _refuse_unused(shared, made)
    return made


def write_out(
    shared: MethodConfig, methods: Mapping[str, MethodConfig], problem: Known = UNKNOWN
) -> tuple[MethodConfig, dict[str, MethodConfig]]:
    """The tables of methods with every default written out.

    A default goes to ``[method]`` if all methods that have the key agree on it, else to each.
    Algorithms go to each, so that a method added to these tables may be named after its own.
    """
    made = make_methods(shared, methods, problem=problem)
    open_keys = {
        setting.name
        for method in made.values()
        for setting in settings_of(type(method.algorithm))
        if _may_be_open(setting)
    }
    shared, methods = (
        shared.without_auto(open_keys),
        {name: table.without_auto(open_keys) for name, table in methods.items()},
    )
    every = {key for method in made.values() for key in method.defaults}
    common: dict[str, Any] = {}
    single: dict[str, dict[str, Any]] = {name: {} for name in methods}
    for key in every - shared.settings.keys():
        defaults = {n: m.defaults[key] for n, m in made.items() if key in m.defaults}
        values = list(defaults.values())
        if all(value == values[0] and type(value) is type(values[0]) for value in values):
            common |= {} if values[0] is None else {key: values[0]}
            continue
        for name, value in defaults.items():
            if value is not None and key not in methods[name].settings:
                single[name][key] = value
    if shared.algorithm is None and not methods:
        common["algorithm"] = DEFAULT
    for name, table in methods.items():
        if shared.algorithm is None and table.algorithm is None:
            single[name]["algorithm"] = named_after(name)
    tables = {n: MethodConfig(**table.model_dump(), **single[n]) for n, table in methods.items()}
    return MethodConfig(**shared.model_dump(), **common), tables


def named_after(method: str) -> str:
    """The algorithm of a method for which none is given; a name of no algorithm is refused.

    >>> named_after("ditto"), named_after("per-fedavg")
    ('ditto', 'per_fedavg')
    """
    for name in (method, method.replace("-", "_")):
        if name in ALGORITHMS:
            return name
    near = closest(method, ALGORITHMS)
    meant = f"; did you mean methods.{near}?" if near else ""
    raise InputError(
        f"methods.{method} is not named after an algorithm and none is given: write algorithm = "
        f'"{near or DEFAULT}" (or another, see `nufed list`) in it, or in [method] for all methods'
        f"{meant}"
    )


def with_objects(
    methods: Mapping[str, MethodConfig],
    given: Mapping[str, Algorithm],
    shared: MethodConfig | None = None,
    problem: Known = UNKNOWN,
) -> dict[str, MethodConfig]:
    """``[methods.NAME]`` with tables that record algorithms given in Python.

    What an object does not set itself is what is recorded of it, else what ``shared`` sets.
    """
    tables = dict(methods)
    for name, algorithm in given.items():
        table = methods.get(name, MethodConfig())
        if isinstance(algorithm, Algorithm):
            recorded = table if table.algorithm == OWN else MethodConfig()
            both = _Tables(name, shared or MethodConfig(), recorded, problem)
            algorithm = both.completed(algorithm)
        tables[name] = table_of(name, algorithm, table)
    return tables


def table_of(name: str, algorithm: Algorithm, given: MethodConfig) -> MethodConfig:
    """The table that records an algorithm given in Python, beside the ``given`` keys of the run."""
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"methods[{name!r}] is {shown(algorithm)}: it must be an object of a subclass of "
            "nufed.algorithms.Algorithm"
        )
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise InputError(
            f"methods[{shown(name)}]: a name must be made of letters, digits, '.', '-' and '_'"
        ) from None
    steps = algorithm.notes.shown_steps
    shown_after = given.eval_steps or (None if steps is None else [steps])
    return MethodConfig(
        algorithm=OWN, rounds=given.rounds, eval_steps=shown_after, **dict(_plain(algorithm))
    )


def _plain(thing: Any) -> Iterator[tuple[str, Any]]:
    """An object's settings as keys of a configuration, without those that need Python objects."""
    for setting in settings_of(type(thing)):
        value = getattr(thing, setting.name)
        if setting.setting.choices is not None:
            yield setting.name, name_of(type(value), setting.setting.choices)
            yield from _plain(value) if dataclasses.is_dataclass(value) else ()
        elif value is not None and not isinstance(value, Tensor):
            yield setting.name, value


@dataclass(frozen=True)
class _Tables:
    """The two tables of a method's settings: ``[method]``, and ``[methods.NAME]`` of its own."""

    name: str
    shared: MethodConfig
    table: MethodConfig
    problem: Known = UNKNOWN
    defaults: dict[str, Any] = field(default_factory=dict)  # of its keys

    def method(self, given: Algorithm | None) -> Method:
        """The algorithm, built from the settings that it has."""
        given_names = [n for n in (self.table.algorithm, self.shared.algorithm) if n is not None]
        name = given_names[0] if given_names else named_after(self.name)
        if name == OWN:
            if given is None:
                return Method(GivenInPython(self.table.settings), {})
            recorded = _Tables(self.name, MethodConfig(), self.table, self.problem)
            return Method(recorded.completed(given), recorded.defaults)
        cls = ALGORITHMS.find(f"{self._where('algorithm')}.algorithm", name)
        settings = self._settings(cls)
        for key in self.table.settings:
            if key not in self.defaults:
                raise self._lacks(key, name)
        try:
            return Method(cls(**settings), self.defaults)
        except Exception as error:  # the user's class may raise anything
            raise self._not_made("algorithm", name, error) from error

    def completed(self, given: Algorithm) -> Algorithm:
        """An object given in Python, with the tables' values of what it does not set itself."""
        settings, explicit = self._settings(type(given), given), explicit_settings(given)
        parts = {key: value for key, value in settings.items() if key not in explicit}
        return dataclasses.replace(given, **parts) if parts else given

    def _where(self, key: str) -> str:
        """The table that sets a key, or else the method's own."""
        in_own = key in self.table.model_dump() or key not in self.shared.model_dump()
        return f"methods.{self.name}" if in_own else "method"

    def _given(self, key: str) -> Any:
        return self.table.settings.get(key, self.shared.settings.get(key, MISSING))

    def _settings(self, cls: type, base: Any = None) -> dict[str, Any]:
        """The given arguments of a class; ``base`` is an object to take the defaults from."""
        arguments: dict[str, Any] = {}
        for setting in fields_of(cls):
            key, value = setting.name, self._given(setting.name)
            value = MISSING if value == AUTO and _may_be_open(setting) else value
            if key in self.defaults:
                raise InputError(f"methods.{self.name}: two of its classes have a setting {key}")
            default = setting.default if base is None else getattr(base, key)
            if default is MISSING and value is MISSING:
                raise InputError(
                    f"is missing: {cls.__name__} needs it ({setting.setting.about}), "
                    f"{setting.allowed()}",
                    f"methods.{self.name}.{key}",
                )
            if setting.setting.choices is not None:
                if base is not None and value == name_of(type(default), setting.setting.choices):
                    value = MISSING  # an object given in Python may be of any class
                arguments |= self._choice(setting, value, default)
            else:
                known = self._by_problem(setting)
                if known is not None:
                    default = known
                    value = known if value is MISSING else value
                waits = self.problem.looks and setting.setting.of_longest_step is not None
                writable = default if isinstance(default, bool | int | float | str) else None
                self.defaults[key] = AUTO if waits and base is None else writable
                if value is not MISSING:
                    arguments[key] = self._value(setting, value)
        self._follow(cls, base, arguments)
        return arguments

    def _by_problem(self, setting: SettingField) -> float | None:
        """The default that depends on the run, where that is known."""
        limits, problem = setting.setting, self.problem
        rounds = self.table.rounds or problem.rounds
        if limits.of_rounds is not None and rounds is not None:
            return round(limits.of_rounds * rounds)
        kind = self._given("optimizer")
        if limits.of_longest_step is None or problem.curvature is None:
            return None
        if kind not in (MISSING, "sgd", "nesterov"):  # whose steps are no multiples of gradients
            return None
        usual = 0.9 if kind == "nesterov" else 0.0
        momentum = self._given("momentum")
        momentum = usual if momentum is MISSING else momentum
        share = limits.of_longest_step * (1 - momentum if setting.name == "meta_lr" else 1)
        return float(f"{share / problem.curvature:.2g}")

    def _follow(self, cls: type, base: Any, arguments: dict[str, Any]) -> None:
        """Let settings that are not given take the value of the one that they follow."""
        for setting in fields_of(cls):
            key, shared = setting.name, setting.setting.follows
            if shared is None:
                continue
            value = arguments.get(shared, self.defaults[shared])
            self.defaults[key] = value
            if value != AUTO and (base is None or not {key, shared} & explicit_settings(base)):
                arguments.setdefault(key, value)

    def _choice(self, setting: SettingField, value: Any, default: Any) -> dict[str, Any]:
        """The object of a choice, if its name or any of its settings is given."""
        key, choices = setting.name, setting.setting.choices
        assert choices is not None
        self.defaults[key] = None if default is MISSING else name_of(type(default), choices)
        if value is MISSING:
            parts = self._settings(type(default), default)
            return {key: dataclasses.replace(default, **parts)} if parts else {}
        cls = self._chosen(f"{self._where(key)}.{key}", value, choices)
        parts = self._settings(cls)
        try:
            return {key: cls(**parts)}
        except Exception as error:  # the user's class may raise anything
            raise self._not_made(key, value, error) from error

    def _not_made(self, key: str, name: str, error: Exception) -> InputError:
        """A class refuses a setting, or fails with all of them."""
        if isinstance(error, InputError) and error.key:
            return error.within(self._where(error.key))
        return InputError(
            f"= {shown(name)} can't be made with these settings: {in_short(error)}",
            f"{self._where(key)}.{key}",
        )

    def _chosen(self, where: str, name: Any, choices: Mapping[str, type]) -> type:
        if isinstance(name, str) and isinstance(choices, Registry):
            cls: type = choices.find(where, name)
            return cls
        if isinstance(name, str) and name in choices:
            return choices[name]
        near = suggest(name, choices) if isinstance(name, str) else ""
        # a value of [method] may suit other methods of the run
        whose = "" if where.startswith("methods.") else f" for {self.name}"
        raise InputError(
            f"= {shown(name)}: must be one of {', '.join(choices)}{whose}{near}", where
        )

    def _value(self, setting: SettingField, value: Any) -> Any:
        key = f"{self._where(setting.name)}.{setting.name}"
        require(bool(setting.kinds), key, value, "can only be set in Python")
        setting.check(value, key)
        printable = not isinstance(value, str) or value.isprintable()
        require(printable, key, value, "must be printable text")
        whole = isinstance(value, int) and not isinstance(value, bool) and int not in setting.kinds
        return float(value) if whole else value

    def _lacks(self, key: str, algorithm: str) -> InputError:
        has, full = ", ".join(sorted(self.defaults)), f"methods.{self.name}.{key}"
        if key in known_settings():
            return InputError(
                f"= {shown(self.table.settings[key])}: {algorithm} has no such setting"
                f"{_belongs(key)}, it takes {has}; remove it or use another algorithm",
                full,
            )
        near = suggest_key(full, [f"methods.{self.name}.{k}" for k in self.defaults])
        return InputError(f"unknown key {shown(full)}: {algorithm} takes {has}{near}")


def _refuse_unused(shared: MethodConfig, made: Mapping[str, Method]) -> None:
    """Refuse a key of ``[method]`` that is not a setting of any method of the run."""
    for key, value in shared.settings.items():
        if any(key in method.defaults for method in made.values()):
            continue
        if key in known_settings():
            raise InputError(
                f"= {shown(value)}: no method of this run ({', '.join(made)}) has this setting"
                f"{_belongs(key)}; remove it",
                f"method.{key}",
            )
        takes = {key for method in made.values() for key in method.defaults}
        near = suggest_key(f"method.{key}", [f"method.{k}" for k in sorted(takes)])
        raise InputError(
            f"unknown key {shown(f'method.{key}')}: the methods of this run ({', '.join(made)}) "
            f"take {', '.join(sorted(takes))}{near}"
        )


def _belongs(key: str) -> str:
    """The choices that a key belongs to, for a message."""
    every = [each for cls in ALGORITHMS.working().values() for each in every_setting(cls)]
    conditions = sorted({where for setting, where in every if setting.name == key})
    return f" (it belongs to {' or '.join(conditions)})" if all(conditions) else ""


def _may_be_open(setting: SettingField) -> bool:
    """Whether the value may be measured on the problem before training."""
    return setting.setting.of_longest_step is not None or setting.setting.follows is not None
