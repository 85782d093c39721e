"""The schema of a run's configuration: its tables, their keys and defaults.

``[method]`` holds settings that all methods share; ``[methods.NAME]`` adds a method with settings
of its own (:mod:`nufed.lab.config.methods`). Files and overrides are read by
:mod:`nufed.lab.config.load`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias, cast, get_args

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_serializer

from nufed.algorithms.compression import CODECS, Codec, TopK
from nufed.algorithms.protocol import Algorithm
from nufed.data import (
    PARTITIONS,
    SHIFTS,
    Fill,
    Preparation,
    PreparedColumn,
    Reuse,
    ScoredOn,
    SmallAgents,
)
from nufed.data.augmentation import AUGMENTATIONS
from nufed.errors import InputError
from nufed.evaluate import EvalLr
from nufed.evaluate.metrics import Better
from nufed.lab.config.describe import AT_SITES as AT_SITES, OWN as OWN, Name, key, optional
from nufed.lab.config.devices import picked_device
from nufed.lab.config.methods import Known, MethodConfig, make_methods, with_objects, write_out
from nufed.lab.files import sha256
from nufed.objective.modules import MemoryFormat, Precision, RunningStats
from nufed.registry import is_code, suggest
from nufed.simulation.engine import EngineName
from nufed.simulation.faults import ATTACKS


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CompressionConfig(_Table):
    """``[compression]``: of what agents send, the same in simulation and in a federation."""

    codec: Literal["off", "bfloat16", "int8", "top_k"] = key(
        "off",
        "of each number's change: off | bfloat16 | int8 | top_k, the last two with error feedback",
    )
    share: float = key(0.01, "of the numbers that top_k sends", gt=0, le=1)

    def make(self) -> Codec | None:
        """The codec; None: nothing is compressed."""
        if self.codec == "off":
            return None
        return TopK(self.share) if self.codec == "top_k" else CODECS[self.codec]()


SamplerName: TypeAlias = Literal["tpe", "random", "grid"]
ScoredAgents: TypeAlias = Literal["seen", "unseen"]
BudgetUnit: TypeAlias = Literal["gradient", "trial"]


class TuneTable(_Table):
    """``[tune]``. A range is ``[low, high]``, a list of choices, or ``"auto"``: as declared."""

    budget: float = key(
        50.0,
        "per method: gradients in full trainings by the cheapest method, or trials",
        gt=0,
        le=1e9,
    )
    per: BudgetUnit = optional(
        "gradient", "what the budget counts; per trial, expensive methods get as many as others"
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = key(0, "of the search")
    agents: ScoredAgents = key(
        "seen", "whose validation samples count: those in training, or held-out newcomers"
    )
    sampler: SamplerName | Literal["auto"] = key(
        "auto", "auto: tpe if optuna is installed, else random"
    )
    halvings: Annotated[int, Field(ge=0, le=6)] = key(
        2, "how often only the best third of a batch is trained twice as long"
    )
    finalists: Annotated[int, Field(ge=1, le=100)] = key(
        2, "best trials of each method that are repeated"
    )
    repeats: Annotated[int, Field(ge=0, le=100)] = key(2, "other seeds that they are repeated with")
    ranges: dict[str, Any] = key({}, "settings to search, of every method that has them")
    methods: dict[str, dict[str, Any]] = key({}, "settings to search, by method")


class TunedTable(_Table):
    """``[tuned]``, written by ``nufed tune``: the search that chose the methods' settings.

    ``unit`` is the work of one full training by the cheapest method: gradients, and two for each
    Hessian-vector product. ``per``: whether ``budget`` counts these units, or trials.
    """

    budget: float = key(..., "that every method had")
    per: BudgetUnit = optional("gradient", "what the budget counted")
    unit: float = key(..., "gradients of one full training by the cheapest method")
    seed: int = key(..., "of the search")
    sampler: SamplerName = key(..., "that proposed trials")
    agents: ScoredAgents = key(..., "whose validation samples counted")
    trials: dict[str, int] = key(..., "trials of each method")
    choices: dict[str, dict[str, Any]] = key(..., "chosen settings of each method")

    @property
    def budget_text(self) -> str:
        """The budget of every method, as text."""
        if self.per == "trial":
            return f"{self.budget:g} trials"
        return f"{self.budget:g} × {self.unit:,.0f} gradients"


Baseline: TypeAlias = Literal["majority", "centroid", "untrained", "local"]
FEDERATION_NORM = 100.0  # the default of max_update_norm in a federation
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def within(value: object, bounds: Sequence[float]) -> bool:
    """Whether a value is a number in [least, most].

    >>> within(3, [1, 5]), within(True, [0, 1]), within("3", [1, 5])
    (True, False, False)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bounds[0] <= cast(float, value) <= bounds[1]


def _partition(name: str) -> str:
    if name in ("auto", OWN) or name in PARTITIONS or is_code(name):
        return name
    raise ValueError(f"one of auto, {PARTITIONS.listed()}{suggest(name, PARTITIONS)}")


def _augmentation(name: str) -> str:
    if name == "none" or name in AUGMENTATIONS or is_code(name):
        return name
    names = ["none", *AUGMENTATIONS]
    raise ValueError(
        f"one of {', '.join(names)}, or your own as package.module:function{suggest(name, names)}"
    )


def _one_of(known: Mapping[str, Any], *further: str) -> AfterValidator:
    """Accepts the names of ``known``, and ``further`` ones."""

    def check(name: str) -> str:
        names = [*further, *known]
        if name in names:
            return name
        raise ValueError(f"one of {', '.join(names)}{suggest(name, names)}")

    return AfterValidator(check)


class PrepareConfig(_Table):
    """``[data.prepare]``: how the raw columns of a table become inputs of a model."""

    fill: Fill = key(
        "median",
        "what numbers are centred at, and what replaces missing ones: the median or "
        "mean of training",
    )
    columns: list[Annotated[PreparedColumn, BeforeValidator(PreparedColumn.read)]] = optional(
        [], "a preparation that was learned before, in place of one learned by this run"
    )

    @field_serializer("columns")
    def _plain(self, columns: list[PreparedColumn]) -> list[dict[str, Any]]:
        return Preparation(tuple(columns)).describe() if columns else []

    @property
    def given(self) -> Preparation | None:
        """The preparation that the configuration holds, if any."""
        return Preparation(tuple(self.columns)) if self.columns else None


class DataConfig(_Table):
    """``[data]``: the samples, and how they are split among agents."""

    source: str = key("digits", "a data set by name, or package.module:function")
    args: dict[str, Any] = key({}, "arguments of that function")
    partition: Annotated[str, AfterValidator(_partition)] = key(
        "auto",
        "by name, or package.module:function; auto: given if the data has owners, else dirichlet",
    )
    partition_args: dict[str, Any] = key({}, "arguments of that function")
    agents: Count = key(50, "N; not used by the partition 'given'")
    samples_per_agent: Count | None = key(
        None, "all parts together; by default the data is shared out"
    )
    dirichlet: float = key(
        0.01,
        "α_d, of the partitions dirichlet, dirichlet_by_class and quantity_skew",
        gt=0,
        lt=float("inf"),
    )
    reuse: Reuse = key(
        "never",
        "whether agents may share samples; if so, most training samples of unseen "
        "agents are also seen agents' (docs/data.md)",
    )
    classes_per_agent: Count = key(2, "of the partition 'shards'")
    shift: Annotated[str, _one_of(SHIFTS, "none")] = optional(
        "none", "feature or label shift between groups of agents: none | " + " | ".join(SHIFTS)
    )
    shift_args: dict[str, Any] = optional({}, "arguments of that shift")
    augment: Annotated[str, AfterValidator(_augmentation)] = optional(
        "none",
        "random changes of the inputs of training batches: none | crop_flip (images), "
        "or package.module:function",
    )
    validation: Fraction = key(0.0, "share of an agent's samples that choices are made on")
    test: float = key(0.2, "share of an agent's samples that are scored", gt=0, lt=1)
    unseen_agents: Annotated[int, Field(ge=0)] = key(0, "held out from training")
    unseen: list[str] | None = optional(
        None,
        "names of the agents held out from training, in place of a number; default: "
        "those that the data source names, if any; []: none",
    )
    stratify: bool = optional(
        False, "every part of an agent gets its share of each class, so that few shots are exact"
    )
    small_agents: SmallAgents = key(
        "refuse", "agents with fewer samples than a batch: refused, or all samples are a batch"
    )
    prepare: PrepareConfig = optional(PrepareConfig())
    split_file: str | None = key(
        None, "path of a saved split to use, never written; {seed} is replaced by the seed"
    )

    @property
    def partition_settings(self) -> dict[str, Any]:
        """The keys of this table that reach every partition with an argument of that name."""
        return {"concentration": self.dirichlet, "classes_per_agent": self.classes_per_agent}

    @property
    def held_out(self) -> int | list[str]:
        """The agents held out from training: how many, or their names."""
        return self.unseen_agents if self.unseen is None else self.unseen


class LoraConfig(_Table):
    """``[model.lora]``: low-rank adapters, for ``model.train = "lora"``."""

    rank: Count = key(8, "of an adapter's matrices")
    alpha: float = key(16.0, "scale: an adapter adds alpha / rank·B·A", gt=0, lt=float("inf"))
    targets: list[str] = key([], "ends of names of linear layers; none: as peft knows them")
    freeze_a: bool = key(False, "train B only (FFA-LoRA)")
    head: bool = key(True, "train the last layer, too")


class ModelConfig(_Table):
    """``[model]``: the network."""

    name: str = key(
        "fcnn", "a model by name, hf:FOLDER_OR_NAME (pretrained), or package.module:function"
    )
    args: dict[str, Any] = key({}, "arguments of that function")
    train: str = key("all", "what is trained: all that is not frozen, a part such as head, or lora")
    lora: LoraConfig = key(LoraConfig(), "adapters, for train = lora")
    running_stats: RunningStats = key(
        "refuse", "of BatchNorm: refused, frozen, or trained with the model"
    )
    micro_batch: Annotated[int, Field(ge=0)] = optional(
        0, "samples computed at a time, so that large models fit; 0: a whole batch"
    )
    gradient_checkpointing: bool = optional(
        False, "compute layers again in backward passes instead of keeping what they made"
    )


class FaultsConfig(_Table):
    """``[faults]``: simulated faults of agents, to measure their effect on accuracy."""

    dropout: Fraction = key(0.0, "probability that an agent does not answer")
    stragglers: Fraction = key(0.0, "probability that it answers too late")
    corruption: Fraction = key(0.0, "share of agents that send wrong updates")
    attack: Annotated[str, _one_of(ATTACKS)] = key("sign_flip", "what corrupt agents send")


class FederationConfig(_Table):
    """``[federation]``: format of the sites' data, and timeouts, for ``nufed federate``."""

    input_shape: list[Count] | None = key(None, "of one sample")
    vocabulary: Count | None = key(
        None,
        "texts: inputs are identifiers of so many tokens; without classes, targets are "
        "the next tokens",
    )
    inputs: list[str] = key([], 'names of several inputs, such as ["input_ids", "attention_mask"]')
    classes: list[str] = key([], "class names, by number; none: regression")
    outputs: Count = key(1, "numbers per target, for regression")
    deadline: float = key(600.0, "deadline of a round, in seconds", gt=0, lt=float("inf"))
    wait: float = key(60.0, "quorum timeout, in seconds", gt=0, lt=float("inf"))
    secure_aggregation: bool = key(False, "the server learns only the sum of the sites' updates")
    site_keys: list[str] = key([], "public keys of the sites, by number, for secure aggregation")


class PrivacyConfig(_Table):
    """``[privacy]``: clipping and noise that a federation's sites apply to their updates."""

    clip: float | None = key(None, "norm bound of an update's change; off", gt=0, lt=float("inf"))
    noise: float = key(
        1.0, "noise multiplier z of each site (standard deviation / clip)", gt=0, lt=float("inf")
    )
    delta: float = key(1e-5, "δ of both ε", gt=0, lt=1)
    epsilon: float | None = key(None, "budget of ε for the released model", gt=0)
    epsilon_server: float | None = key(None, "budget of ε against the server", gt=0)
    scores: bool = key(False, "whether sites send scores, which no ε covers")


class Config(_Table):
    """A run: data, a model, and the methods and seeds to train."""

    name: Name = key("run", "of the run and its directory")
    note: str = optional(
        "", "text for the report, for example how the problem was chosen", max_length=2000
    )
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = key(
        [0], "every method is trained once with each"
    )
    rounds: Count = key(100, "communication rounds (K)")
    participation: float = key(0.2, "fraction of the agents picked per round (r)", gt=0, le=1)
    min_updates: Count = key(
        1, "quorum: valid updates a round needs, else another cohort is sampled"
    )
    max_update_norm: Annotated[float, Field(gt=0)] | Literal["off"] | None = key(
        None,
        "norm bound of a change, in medians of this round's or the last's, from three "
        "updates on; "
        f"default: {FEDERATION_NORM:g} in federations without [privacy] and secure_aggregation",
    )
    eval_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = key(
        "auto", "fine-tuning steps shown; auto: the largest ν, at least 1"
    )
    eval_lr: EvalLr = key(
        "chosen",
        "step size of fine-tuning at evaluation; chosen: also with the best one on "
        "validation samples, for the final model; chosen_by_round: for every evaluated one",
    )
    tune_local: bool = key(
        False, "choose the step size of the baseline 'local' on validation samples"
    )
    local_lr: float | None = optional(
        None,
        "step size of the baseline 'local'; default: meta_lr of the first method",
        gt=0,
        lt=float("inf"),
    )
    eval_on: ScoredOn = key("test", "the part that agents are scored on; choices use validation")
    eval_agents: Count | None = key(
        None, "number of agents to evaluate, a fixed sample; all by default"
    )
    baselines: list[Baseline] = key(
        ["majority", "untrained", "local"],
        "null baselines to evaluate: majority, centroid (nearest class mean), untrained, local",
    )
    eval_every: Count = key(10, "rounds between evaluations")
    checkpoint_every: Annotated[int, Field(ge=0)] = key(
        20, "rounds between checkpoints to resume from; 0: only when stopped"
    )
    save_every: Annotated[int, Field(ge=0)] = key(0, "rounds between saved models; 0: none")
    stop_when: Count | None = optional(
        None,
        "early stopping: evaluations without a better validation score after which "
        "training ends; off",
    )
    keep: Literal["last", "best"] = optional(
        "last",
        "the model that results show: of the last round, or of the one with the best "
        "validation score",
    )
    loss: str = key("auto", "cross_entropy, mse, next_token, or package.module:function")
    metric: str = key(
        "auto",
        "accuracy, balanced_accuracy, f1 (macro), auc (each class against the rest), "
        "perplexity, bits_per_character (of classes or tokens), none (the loss), or "
        "package.module:function, called with outputs and targets of an agent",
    )
    metric_better: Better = optional(
        "higher", "whether a higher or a lower value of a metric of your own is better"
    )
    measured_curvature: Annotated[float, Field(gt=0)] | None = optional(
        None,
        "κ, largest curvature along the first gradients, from which step sizes come that are not "
        "given; measured and recorded by a run",
    )
    dtype: Literal["float32", "float64"] = key("float32", "of all vectors")
    precision: Precision = optional(
        "float32", "of the model's products; bfloat16: mixed precision, with vectors in float32"
    )
    memory_format: MemoryFormat = optional(
        "contiguous",
        "of convolutions' images and kernels; channels_last, on the engine direct, is "
        "often faster and agrees to rounding",
    )
    threads: Annotated[int, Field(ge=1, le=256)] = key(
        1, "torch threads; bits depend on their number"
    )
    engine: EngineName | Literal["auto"] = key(
        "auto", "how agents are simulated; auto: from config and shapes"
    )
    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = key(
        "auto", "processes; bits do not depend on their number"
    )
    device: Annotated[str, AfterValidator(picked_device)] = key(
        "cpu", "torch device to compute on; auto: cuda, xpu, mps or cpu"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    methods: dict[Name, MethodConfig] = {}

    faults: FaultsConfig = FaultsConfig()
    federation: FederationConfig = optional(FederationConfig())
    compression: CompressionConfig = optional(CompressionConfig())
    privacy: PrivacyConfig = optional(PrivacyConfig())
    approval: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] = optional(
        {},
        "of a federation: rounds and settings of methods that may be changed without "
        "a new approval of its sites, with [least, most] of each",
    )
    sweep: dict[str, Any] = optional(
        {}, 'for `nufed sweep`: keys with a list of values or a range "0..5" each'
    )
    tune: TuneTable = optional(TuneTable())
    tuned: TunedTable | None = optional(
        None, "written by `nufed tune`: the search that chose the methods' settings"
    )

    def norm_bound(self, default: float | None = None) -> float | None:
        """``max_update_norm`` as a number; None: no bound. ``default`` is for a key not given."""
        bound = self.max_update_norm
        return default if bound is None else None if bound == "off" else bound

    @property
    def steps_shown(self) -> int:
        """``eval_steps`` as a number: the fine-tuning steps after which results are shown."""
        if self.eval_steps != "auto":
            return self.eval_steps
        return max(1, *(a.adaptation.steps for a in self.algorithms().values()))

    def rounds_of(self, method: str) -> int:
        """The communication rounds of a method, or of a null baseline."""
        table = self.methods.get(method)
        return (table and table.rounds) or self.rounds

    @property
    def all_rounds(self) -> dict[str, int]:
        """``rounds``, and those of methods with rounds of their own, by key."""
        by_method = {f"methods.{name}.rounds": table.rounds for name, table in self.methods.items()}
        return {"rounds": self.rounds, **{key: n for key, n in by_method.items() if n is not None}}

    def shortened(self, rounds: int) -> Config:
        """A copy with fewer rounds; rounds of single methods shrink in proportion."""
        methods = {
            name: table.model_copy(update={"rounds": -(-table.rounds * rounds // self.rounds)})
            if table.rounds
            else table
            for name, table in self.methods.items()
        }
        return self.model_copy(update={"rounds": rounds, "methods": methods})

    def steps_of(self, method: str) -> list[int]:
        """The numbers of fine-tuning steps after which a method's results are shown."""
        of_method = self.methods[method].eval_steps if method in self.methods else None
        usual = self.algorithms()[method].notes.shown_steps
        return of_method or self.method.eval_steps or [self.steps_shown if usual is None else usual]

    @property
    def steps_evaluated(self) -> int:
        """The largest number of steps shown for any method; all smaller ones are scored, too."""
        return max(self.steps_shown, *(s for m in self.algorithms() for s in self.steps_of(m)))

    def algorithms(
        self, given: Mapping[str, Algorithm] | None = None, recorded: bool = True
    ) -> dict[str, Algorithm]:
        """The methods to train, by name; ``given`` are those that were given in Python.

        Unless it is ``recorded``, ``[method]`` must not hold keys that no method has.

        Imports nothing: modules that the configuration names must be imported already.
        """
        if given is None and recorded:
            return dict(self._algorithms)
        return self._make_algorithms(given, recorded)

    @cached_property  # a run and its report ask hundreds of times
    def _algorithms(self) -> dict[str, Algorithm]:
        return self._make_algorithms(None, True)

    def _make_algorithms(
        self, given: Mapping[str, Algorithm] | None, recorded: bool
    ) -> dict[str, Algorithm]:
        for name in get_args(Baseline):
            if name in self.methods:
                raise InputError(
                    f"methods.{name}: {name} is the name of a null baseline; give the method "
                    "another name"
                )
        made = make_methods(self.method, self.methods, given, recorded, self._known())
        return {name: method.algorithm for name, method in made.items()}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, without what was computed from the earlier ones."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("_algorithms", None)
        return copied

    def _known(self) -> Known:
        return Known(self.rounds, self.measured_curvature)

    def with_objects(
        self, given: Mapping[str, Algorithm], shared: MethodConfig | None = None
    ) -> Config:
        """A copy with placeholders, which hold the settings, for algorithms given in Python.

        What an object does not set itself is as recorded, or as in ``shared``.
        """
        return self.model_copy(
            update={"methods": with_objects(self.methods, given, shared, self._known())}
        )

    def written_out(self, looks: bool = False) -> Config:
        """A copy with the defaults of all settings of methods written out.

        ``looks``: step sizes that will be measured on the problem are recorded as "auto".
        """
        method, methods = write_out(self.method, self.methods, replace(self._known(), looks=looks))
        return self.model_copy(update={"method": method, "methods": methods})

    @property
    def looks(self) -> bool:
        """Whether step sizes must be measured on the problem before training."""
        return self.written_out() != self

    def with_curvature(self, most: float | None) -> Config:
        """A copy with step sizes from the largest curvature κ along first gradients.

        Where it is not known, not finite or 0 they are the classes' own defaults.
        """
        known = float(f"{most:.3g}") if most is not None and 0 < most < math.inf else None
        return self.model_copy(update={"measured_curvature": known}).written_out()

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of everything that determines bits, except rounds."""
        others: Any = {
            "name": True,
            "note": True,
            "rounds": True,
            "workers": True,
            "approval": True,
            "tune": True,
            "tuned": True,
            "measured_curvature": True,
            "methods": {"__all__": {"rounds"}},
        }
        exact = self.model_dump(exclude=others)
        try:
            json.dumps(exact, allow_nan=False, default=str)
        except ValueError:  # inf, -inf and nan, which are all null in pydantic's JSON
            return sha256(json.dumps(exact, default=str).encode())
        return sha256(self.model_dump_json(exclude=others).encode())

    def to_toml(self) -> str:
        """The configuration as TOML; loading it restores it."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
