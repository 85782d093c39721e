"""The one schema of a run's configuration: its tables, their keys and defaults.

In ``[method]`` stands what all methods share; ``[methods.NAME]`` adds a method and says what is its
own. How a file and overrides become a configuration is in :mod:`nufed.runs.config`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from nufed.aggregate import Aggregation, Averaging, ClippedMean, Mean, Median, TrimmedMean
from nufed.algorithm import Algorithm
from nufed.algorithms import ALGORITHMS
from nufed.data import Reuse, ScoredOn, SmallAgents
from nufed.errors import InputError, shown
from nufed.evaluate import EvalLr
from nufed.metagrad import Curvature, Exact, FirstOrder, HessianFree
from nufed.runs.durable import sha256
from nufed.runs.messages import suggest

OWN = "given in Python"  # stands in a configuration for what was passed as an object
AT_SITES = "at the sites"  # stands there for the data of a federation
T = TypeVar("T")
# becomes the name of a directory: neither separators nor a dot in front
Name = Annotated[str, Field(pattern=r"^[\w][\w.-]*$", max_length=80)]
Baseline: TypeAlias = Literal["majority", "untrained", "local"]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(_Table):
    """``[data]``: the samples, and how they are dealt out to agents."""

    source: str = Field(
        default="digits", description="a data set by name, or package.module:function"
    )
    args: dict[str, Any] = Field(default={}, description="arguments of that function")
    partition: Literal["auto", "dirichlet", "iid", "shards", "given"] = "auto"
    agents: Count = Field(default=50, description="N; not used by the partition 'given'")
    samples_per_agent: Count | None = None
    dirichlet: float = Field(default=0.01, gt=0, lt=float("inf"), description="α_d")
    reuse: Reuse = Field(
        default="never",
        description="whether agents share samples; if so, most training samples of unseen agents "
        "are seen agents' too (docs/data.md)",
    )
    classes_per_agent: Count = Field(default=2, description="of the partition 'shards'")
    validation: Fraction = 0.0
    test: Annotated[float, Field(gt=0, lt=1)] = 0.2
    unseen_agents: Annotated[int, Field(ge=0)] = Field(
        default=0, description="held out from training"
    )
    small_agents: SmallAgents = "refuse"
    split_file: str | None = Field(
        default=None,
        description="a saved split to use as it is, any path, only read; {seed} is the seed",
    )


class ModelConfig(_Table):
    """``[model]``: the network."""

    name: str = Field(default="fcnn", description="a model by name, or package.module:function")
    args: dict[str, Any] = Field(default={}, description="arguments of that function")
    running_stats: Literal["refuse", "frozen"] = "refuse"


class MethodConfig(_Table):
    """``[method]`` and ``[methods.NAME]``: an algorithm and its settings.

    Ranges are the algorithm's own business: :meth:`build` makes it, and it checks them.
    """

    algorithm: str = "gmeta"
    adapt_steps: int = Field(default=1, description="ν")
    adapt_lr: float = Field(default=0.01, description="α")
    meta_lr: float = Field(default=0.001, description="β")
    local_steps: int = Field(default=4, description="τ")
    batch_size: int = Field(default=40, description="D")
    curvature: Literal["exact", "first_order", "hessian_free"] = "exact"
    fd_step: float | Literal["auto"] = Field(default="auto", description="δ")
    averaging: Averaging = "uniform"
    aggregation: Literal["mean", "clipped", "median", "trimmed"] = Field(
        default="mean", description="how the server combines updates; the others are robust"
    )
    trim: float = Field(default=0.2, description="the share that 'trimmed' leaves out at each end")
    # left out of what is written where it is not set, so that runs without it stay as they were
    rates_lr: float | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="step size with which step sizes are learned, from adapt_lr on; off",
    )
    eval_steps: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = Field(
        default=None, description="fine-tuning steps to show it after, a list; the run's by default"
    )

    def build(self) -> Algorithm:
        """The algorithm with those of the settings that it takes."""
        ways = {"curvature": self._curvature(), "aggregation": self._aggregation()}
        settings = {k: v for k, v in {**dict(self), **ways}.items() if v is not None}
        taken = {k: settings[k] for k in self.taken() & set(settings)}
        return ALGORITHMS[self.algorithm](**taken)

    def taken(self) -> set[str]:
        """The settings that the algorithm takes."""
        if self.algorithm not in ALGORITHMS:
            raise InputError(
                f"algorithm = {shown(self.algorithm)}: must be one of {', '.join(ALGORITHMS)}"
                + suggest(self.algorithm, ALGORITHMS)
            )
        return set(inspect.signature(ALGORITHMS[self.algorithm]).parameters)

    def _aggregation(self) -> Aggregation:
        trimmed = TrimmedMean(self.trim)  # checks the share, also where it is not used
        ways: dict[str, Aggregation] = {
            "mean": Mean(self.averaging),
            "clipped": ClippedMean(),
            "median": Median(),
            "trimmed": trimmed,
        }
        return ways[self.aggregation]

    def _curvature(self) -> Curvature:
        hessian_free = HessianFree(self.fd_step)  # checks the step, also where it is not used
        ways: dict[str, Curvature] = {
            "exact": Exact(),
            "first_order": FirstOrder(),
            "hessian_free": hessian_free,
        }
        return ways[self.curvature]


# settings that are given to an algorithm as a part of another one
_PART_OF = {"fd_step": "curvature", "averaging": "aggregation", "trim": "aggregation"}


class FaultsConfig(_Table):
    """``[faults]``: what goes wrong with agents, to see what a real federation does to accuracy."""

    dropout: Fraction = Field(default=0.0, description="probability that an agent does not answer")
    stragglers: Fraction = Field(default=0.0, description="that it answers too late")
    corruption: Fraction = Field(default=0.0, description="share of agents that send wrong updates")
    attack: Literal["sign_flip", "scale", "gaussian", "nan", "labels"] = Field(
        default="sign_flip", description="what those send"
    )


class FederationConfig(_Table):
    """``[federation]``: what sites that keep their data agree on, for ``nufed federate``."""

    input_shape: list[Count] | None = Field(default=None, description="of one sample")
    classes: list[str] = Field(default=[], description="their names, by number; none: regression")
    outputs: Count = Field(default=1, description="numbers per target, for regression")
    deadline: float = Field(
        default=600.0, gt=0, lt=float("inf"), description="seconds that sites have for a round"
    )
    wait: float = Field(
        default=60.0, gt=0, lt=float("inf"), description="seconds that too few sites are waited for"
    )


class PrivacyConfig(_Table):
    """``[privacy]``: what a federation's sites do to their updates before they leave."""

    clip: float | None = Field(
        default=None, gt=0, lt=float("inf"), description="longest change of an update; off"
    )
    noise: float = Field(
        default=1.0, gt=0, lt=float("inf"), description="of a site, per coordinate, in clips"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="δ of both ε")
    epsilon: float | None = Field(
        default=None, gt=0, description="most ε that the released model may spend"
    )
    epsilon_server: float | None = Field(
        default=None, gt=0, description="most ε that may be spent against the server"
    )
    scores: bool = Field(
        default=False, description="whether sites still send their scores, which no ε covers"
    )


class Config(_Table):
    """A run: data, a model, and the methods and seeds to train."""

    name: Name = "run"
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    rounds: Count = Field(default=100, description="K")
    participation: float = Field(default=0.2, gt=0, le=1, description="r")
    min_updates: Count = Field(
        default=1, description="usable updates that a round needs; below it another cohort is asked"
    )
    max_update_norm: float | None = Field(
        default=None, gt=0, description="longest change allowed, in medians of the cohort's; off"
    )
    eval_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto", description="fine-tuning steps shown; auto: the largest ν, at least 1"
    )
    eval_lr: EvalLr = Field(
        default="chosen",
        description="step size of fine-tuning at evaluation; chosen: also with the best one on "
        "validation samples, for the final model; chosen_by_round: for every evaluated one",
    )
    tune_local: bool = Field(
        default=False,
        description="choose the step size of the baseline 'local' on validation samples",
    )
    eval_on: ScoredOn = Field(
        default="test", description="the part that agents are scored on; choices use validation"
    )
    eval_agents: Count | None = Field(
        default=None, description="evaluate a fixed sample of so many agents; all by default"
    )
    baselines: list[Baseline] = Field(
        default=["majority", "untrained", "local"], description="null baselines to set beside"
    )
    eval_every: Count = Field(default=10, description="rounds between evaluations")
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(
        default=20, description="rounds between checkpoints to resume from; 0: only when stopped"
    )
    save_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="rounds between saved models"
    )
    loss: str = Field(default="auto", description="cross_entropy, mse, or package.module:function")
    metric: str = Field(default="auto", description="accuracy, none, or package.module:function")
    dtype: Literal["float32", "float64"] = "float32"
    threads: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="torch threads; part of what makes bits repeatable"
    )
    engine: Literal["auto", "direct", "batched", "gram"] = Field(
        default="auto", description="how agents are simulated; auto: from the shapes, see the docs"
    )
    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        default="auto", description="processes; the model is the same for any number"
    )
    device: str = Field(default="cpu", description="where models are computed, as torch names it")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    methods: dict[Name, MethodConfig] = {}
    faults: FaultsConfig = FaultsConfig()
    # left out of what is written where they say nothing, so that other runs stay as they were
    federation: FederationConfig = Field(
        default=FederationConfig(), exclude_if=lambda value: value == FederationConfig()
    )
    privacy: PrivacyConfig = Field(
        default=PrivacyConfig(), exclude_if=lambda value: value == PrivacyConfig()
    )

    @property
    def steps_shown(self) -> int:
        """``eval_steps`` as a number: the fine-tuning steps after which results are shown."""
        if self.eval_steps != "auto":
            return self.eval_steps
        return max(1, *(getattr(a, "adapt_steps", 1) for a in self.algorithms().values()))

    def steps_of(self, method: str) -> list[int]:
        """The numbers of fine-tuning steps after which a method is shown."""
        own = self.methods[method].eval_steps if method in self.methods else None
        return own or self.method.eval_steps or [self.steps_shown]

    @property
    def steps_evaluated(self) -> int:
        """The most fine-tuning steps that any method is shown after: all up to there are scored."""
        return max(self.steps_shown, *(s for m in self.algorithms() for s in self.steps_of(m)))

    def algorithms(self) -> dict[str, Algorithm]:
        """The methods to train, by name, each with the shared settings and its own over them."""
        for name in get_args(Baseline):
            if name in self.methods:
                raise InputError(
                    f"methods.{name}: {name} is the name of a null baseline, which results show "
                    "beside methods; give the method another name"
                )
        _naming("method", self.method.build)
        methods = self.methods or {self.method.algorithm: MethodConfig()}
        return {name: self._algorithm(name, own) for name, own in methods.items()}

    def _algorithm(self, name: str, own: MethodConfig) -> Algorithm:
        given = own.model_dump(exclude_unset=True)
        merged = self.method.model_copy(update=given)
        where = f"methods.{name}"
        taken = _naming(where, merged.taken)
        for key in given:
            used = key in ("algorithm", "eval_steps", *taken) or _PART_OF.get(key) in taken
            if not used:
                raise InputError(
                    f"{where}.{key} = {shown(given[key])}: {merged.algorithm} has no such setting, "
                    f"it takes {', '.join(sorted(taken))}; remove it or use another algorithm"
                )
        return _naming(where, merged.build)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all that decides about bits, but for how long training goes on."""
        return sha256(self.model_dump_json(exclude={"name", "rounds", "workers"}).encode())

    def to_toml(self) -> str:
        """The configuration with every default written out; reading it gives it back."""
        tables = self.model_dump(exclude={"methods"}, exclude_none=True)
        methods = {n: m.model_dump(exclude_unset=True) for n, m in self.methods.items()}
        return tomli_w.dumps({**tables, "methods": methods})


def _naming(where: str, make: Callable[[], T]) -> T:
    """``make()``, with ``where`` in front of the key that an error of it names."""
    try:
        return make()
    except InputError as error:
        raise InputError(f"{where}.{error}") from None
