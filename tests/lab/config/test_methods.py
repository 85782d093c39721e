"""The settings of methods: the fields of their algorithms, and nothing else."""

import sys
import tomllib
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch

from nufed import GMeta, HessianFree, InputError, Samples, registry
from nufed.algorithms import (
    ALGORITHMS,
    AgentResult,
    Algorithm,
    Cost,
    Ditto,
    FedAvg,
    FedL2P,
    PerFedAvg,
    Scaffold,
)
from nufed.algorithms.aggregation import AGGREGATIONS, Aggregation, Mean, TrimmedMean
from nufed.algorithms.protocol import Notes
from nufed.data import PARTITIONS, check_dealt, settings_taken
from nufed.lab.config import load_config, presets
from nufed.lab.config.load import read_config
from nufed.lab.config.problem import build_samples, build_split
from nufed.seeding import stream
from nufed.settings import setting, settings_of

OWN = f"{__name__}:Own"


@dataclass(frozen=True)
class Last:
    """The update of the agent with the highest number."""

    scale: float = setting(1.0, "factor", above=0)

    def combine(self, updates, name, before):
        return self.scale * updates[-1].vectors[name]


@dataclass(frozen=True)
class Own(Algorithm):
    """Returns the model it received."""

    kind: Literal["a", "b"] = setting("a", "kind of step")
    text: str = setting("x", "any text")
    fast: bool = setting(False, "whether it is fast")
    meta_lr: float = setting(0.5, "another default than others have", above=0)
    batch_size: int = setting(3, "samples per batch", least=1)
    aggregation: Aggregation = setting(TrimmedMean(0.3), "rule", choices=AGGREGATIONS)

    notes: ClassVar[Notes] = Notes(newcomer="does nothing")

    def agent_update(self, context, received, state):
        return AgentResult(received, state, Cost())


def local(samples, agents, samples_per_agent, rng, shift=0):
    return [np.arange(a, a + 20) + shift for a in range(agents)]


def lopsided(samples, agents, samples_per_agent, rng, *, concentration, classes_per_agent):
    """Names its agents, decides on their number, and takes keys of [data]."""
    return {f"size {n}": np.arange(n) for n in (classes_per_agent, round(concentration))}


def made(method=None, **methods):
    return load_config({"method": method or {}, "methods": methods}).algorithms()


def test_shared_keys_reach_every_algorithm_that_has_them():
    found = made(
        {"meta_lr": 0.2, "weight": 0.5, "aggregation": "trimmed", "trim": 0.1, "fd_step": 1e-3},
        ditto={"algorithm": "ditto"},
        scaffold={"algorithm": "scaffold", "aggregation": "mean", "averaging": "samples"},
        hf={"algorithm": "gmeta", "curvature": "hessian_free", "trim": 0.4},
        gmeta={},
        own={"algorithm": OWN},
    )
    assert found == {
        "ditto": Ditto(meta_lr=0.2, weight=0.5, aggregation=TrimmedMean(0.1)),
        "scaffold": Scaffold(meta_lr=0.2, aggregation=Mean("samples")),
        "hf": GMeta(meta_lr=0.2, curvature=HessianFree(1e-3), aggregation=TrimmedMean(0.4)),
        "gmeta": GMeta(meta_lr=0.2, aggregation=TrimmedMean(0.1)),
        "own": Own(meta_lr=0.2, aggregation=TrimmedMean(0.1)),
    }


def test_every_setting_of_every_algorithm_is_a_key_with_its_default():
    for name, cls in ALGORITHMS.items():
        config = load_config({"method": {"algorithm": name}, "rounds": 15})  # FedL2P's 10 · 3/2
        assert config.algorithms() == {name: cls()}
        fields = settings_of(cls)
        chosen = [type(field.default) for field in fields if field.setting.choices is not None]
        inner = [each for kind in chosen for each in settings_of(kind)]
        assert config.method.settings.keys() == {field.name for field in (*fields, *inner)}


def test_different_defaults_of_one_key_stand_at_their_methods():
    config = load_config({"methods": {"gmeta": {}, "own": {"algorithm": OWN}}})
    assert "meta_lr" not in config.method.settings and "rates_lr" in config.method.settings
    assert (config.methods["gmeta"].meta_lr, config.methods["own"].meta_lr) == ("auto", 0.5)
    assert config.method.trim == 0.3  # only one of them has it
    assert load_config(tomllib.loads(config.to_toml())) == config
    assert config.algorithms() == {"gmeta": GMeta(), "own": Own()}


def test_settings_of_one_kind_follow_the_shared_one_unless_given():
    methods = {
        "ditto": {},
        "fixed": {"algorithm": "ditto", "personal_lr": 0.02},
        "other": {"algorithm": "ditto", "meta_lr": 0.5, "local_steps": 2},
        "fedrod": {},
    }
    config = load_config({"method": {"meta_lr": 0.3, "local_steps": 6}, "methods": methods})
    found = {n: (a.meta_lr, a.personal_lr) for n, a in config.algorithms().items()}
    assert found == {
        "ditto": (0.3, 0.3),
        "fixed": (0.3, 0.02),
        "other": (0.5, 0.5),
        "fedrod": (0.3, 0.3),
    }
    assert [config.algorithms()[n].personal_steps for n in ("ditto", "other")] == [6, 2]
    # what is recorded are numbers, which later changes of the shared setting do not move
    tables = tomllib.loads(config.to_toml())
    assert load_config(tables) == config
    tables["method"]["meta_lr"] = 0.7
    assert load_config(tables).algorithms()["ditto"].personal_lr == 0.3
    # in Python, too: objects that were not made with it follow [method]
    objects = {"a": Ditto(), "b": Ditto(personal_lr=0.02), "c": Ditto(meta_lr=0.4)}
    given = load_config({"method": {"meta_lr": 0.3}}, methods=objects)
    made = given.algorithms(objects)
    assert [a.personal_lr for a in made.values()] == [0.3, 0.02, 0.4]
    assert Ditto(meta_lr=0.4, local_steps=3) == Ditto(
        meta_lr=0.4, personal_lr=0.4, local_steps=3, personal_steps=3
    )


def test_counts_that_depend_on_rounds_are_shares_of_them():
    for rounds, expected in ((30, 20), (6, 4), (1, 1)):
        config = load_config({"rounds": rounds, "method": {"algorithm": "fedl2p"}})
        assert config.algorithms()["fedl2p"].pretrain_rounds == expected
        assert config.method.pretrain_rounds == expected  # recorded, and so the same if resumed
        longer = config.model_copy(update={"rounds": 10 * rounds})
        assert longer.algorithms()["fedl2p"].pretrain_rounds == expected
    fixed = load_config({"rounds": 30, "methods": {"fedl2p": {"pretrain_rounds": 3}}})
    assert fixed.algorithms()["fedl2p"].pretrain_rounds == 3
    objects = {"x": FedL2P(), "y": FedL2P(pretrain_rounds=5)}
    made = load_config({"rounds": 30}, methods=objects).algorithms(objects)
    assert [a.pretrain_rounds for a in made.values()] == [20, 5]


BY_SAMPLES = {
    *("fedavg", "fedavgm", "fedper", "fedbabu", "lg_fedavg", "fedala", "fedrod", "knn_per"),
    *("fedl2p", "fedem", "fednova", "feddbe", "fedproto", "moon", "fedpac"),
}


def test_paper_averaging_is_that_of_each_method():
    for name, cls in ALGORITHMS.items():
        expected = Mean("samples" if name in BY_SAMPLES else "uniform")
        config = load_config({"method": {"algorithm": name, "averaging": "paper"}})
        assert config.algorithms()[name].aggregation == expected, name
        assert cls(aggregation=Mean("paper")).aggregation == expected
        assert cls().aggregation == Mean("uniform")  # the default stays nufed's
    config = load_config({"method": {"averaging": "paper"}, "methods": {"fedavg": {}, "ditto": {}}})
    assert config.method.averaging == "paper"
    used = [a.aggregation.averaging for a in config.algorithms().values()]
    assert used == ["samples", "uniform"]


def test_a_method_without_an_algorithm_is_the_one_that_it_is_named_after():
    tables = {"methods": {"ditto": {"weight": 0.5}, "per-fedavg": {}, "gmeta": {}}}
    config = load_config(tables)
    expected = {"ditto": Ditto(weight=0.5), "per-fedavg": PerFedAvg(), "gmeta": GMeta()}
    assert read_config(tables).algorithms() == config.algorithms() == expected
    written = tomllib.loads(config.to_toml())
    assert load_config(written) == config
    written["methods"]["scaffold"] = {}  # a method added to a recorded configuration
    assert load_config(written).algorithms() == {**expected, "scaffold": Scaffold()}
    assert made({"algorithm": "fedavg"}, ditto={}) == {"ditto": FedAvg()}
    assert made(ditto={"algorithm": "fedavg"}) == {"ditto": FedAvg()}
    with pytest.raises(InputError, match=r"methods.fedavg.adapt_steps = 2: fedavg has no such"):
        made(fedavg={"adapt_steps": 2})


@pytest.mark.parametrize(
    ("name", "near"), [("dito", "ditto"), ("pre-fedavg", "per_fedavg"), ("gmeta-hf", "gmeta")]
)
def test_a_name_of_no_algorithm_needs_one_there_or_in_the_shared_table(name, near):
    with pytest.raises(InputError) as caught:
        made(**{name: {}})
    assert str(caught.value).startswith(f"methods.{name} is not named after an algorithm")
    assert f'write algorithm = "{near}"' in str(caught.value)
    assert str(caught.value).endswith(f"in [method] for all methods; did you mean methods.{near}?")
    with pytest.raises(InputError, match=r"in .method. for all methods$"):
        made(quite_other={})
    assert made(**{name: {"algorithm": "fedavg"}}) == {name: FedAvg()}
    assert made({"algorithm": "fedavg"}, **{name: {}}) == {name: FedAvg()}


MIXED = {
    "method": {"aggregation": "trimmed"},
    "methods": {
        "a": {"algorithm": OWN},
        "b": {"algorithm": "gmeta"},
        "c": {"algorithm": "gmeta", "aggregation": "mean"},
    },
}


@pytest.mark.parametrize("source", [*presets(), MIXED, {"method": {"algorithm": OWN}}], ids=str)
def test_writing_defaults_out_changes_no_method(source):
    config = load_config(source)
    assert config.algorithms() == read_config(source).algorithms()
    assert load_config(tomllib.loads(config.to_toml())) == config


def test_what_is_shown_by_default():
    config = load_config({"methods": {"ditto": {"algorithm": "ditto"}, "gmeta": {}}})
    assert (config.steps_of("ditto"), config.steps_of("gmeta")) == ([0], [1])
    config = load_config({"methods": {"ditto": {"algorithm": "ditto", "eval_steps": [2]}}})
    assert config.steps_of("ditto") == [2] and config.steps_evaluated == 2
    config = load_config({"method": {"algorithm": "ditto", "eval_steps": [3]}})
    assert config.steps_of("ditto") == [3]


def test_a_copy_of_a_configuration_has_its_own_algorithms():
    config = load_config({"methods": {"gmeta": {"adapt_steps": 2}}})
    assert config.algorithms()["gmeta"] is config.algorithms()["gmeta"]  # made once
    methods = {"gmeta": config.methods["gmeta"].model_copy(update={"adapt_steps": 5})}
    changed = config.model_copy(update={"methods": methods})
    assert (changed.steps_shown, config.steps_shown) == (5, 2)
    assert config == load_config({"methods": {"gmeta": {"adapt_steps": 2}}})
    assert changed != config and config.model_dump().keys() <= type(config).model_fields.keys()


@pytest.mark.parametrize(
    ("method", "own", "sentence"),
    [
        ({}, {"weight": 1}, "methods.x.weight = 1: gmeta has no such setting, it takes adapt_lr, "),
        ({"weight": 1}, {}, "method.weight = 1: no method of this run (x) has this setting"),
        ({}, {"trim": 0.1}, '(it belongs to aggregation = "trimmed"), it takes adapt_lr'),
        ({"trim": 0.1}, {}, 'this setting (it belongs to aggregation = "trimmed"); remove it'),
        ({}, {"aggregation": "trimed"}, "methods.x.aggregation = 'trimed': must be one of mean, "),
        ({}, {"aggregation": "trimed"}, "did you mean 'trimmed'?"),
        ({}, {"aggregation": 3}, "methods.x.aggregation = 3: must be one of mean, clipped"),
        ({}, {"curvature": "a:B"}, "methods.x.curvature = 'a:B' can't be imported"),
        ({}, {"aggregation": "trimmed", "trim": 0.5}, "methods.x.trim = 0.5: must be a finite"),
        ({}, {"averaging": "all"}, 'methods.x.averaging = \'all\': must be "uniform" or "samples"'),
        ({"local_steps": 1.5}, {}, "method.local_steps = 1.5: must be a whole number, 1 or more"),
        ({"batch_size": True}, {}, "method.batch_size = True: must be a whole number"),
        ({"meta_lr": 10**400}, {}, "must be a finite number, 0 or more"),
        ({"meta_lr": [1]}, {}, "method.meta_lr = [1]: must be a finite number"),
        ({}, {"rates_lr": 0.1, "adapt_steps": 0}, "methods.x.rates_lr = 0.1: with adapt_steps = 0"),
        ({}, {"algorithm": OWN, "kind": "c"}, 'methods.x.kind = \'c\': must be "a" or "b"'),
        ({}, {"algorithm": OWN, "fast": 1}, "methods.x.fast = 1: must be true or false"),
        ({}, {"algorithm": OWN, "text": 1}, "methods.x.text = 1: must be text"),
        ({}, {"algorithm": OWN, "text": "\udcff"}, "must be printable text"),
        ({}, {"algorithm": OWN, "knid": "a"}, "did you mean 'methods.x.kind'?"),
        ({}, {"algorithm": "ditt"}, "methods.x.algorithm = 'ditt': must be one of fedavg, "),
        ({}, {"algorithm": "ditt"}, "package.module:Class; did you mean 'ditto'?"),
        ({}, {"algorithm": "nowhere_:X"}, "methods.x.algorithm = 'nowhere_:X' can't be imported"),
        ({}, {"algorithm": "math:pi"}, "'math:pi' is no algorithm: it must be a subclass of"),
        ({}, {"algorithm": "math:nix"}, "'math:nix' can't be imported (AttributeError"),
        ({}, {"aggregation": "math:sin"}, "is no aggregation rule: it must be a frozen dataclass"),
    ],
)
def test_bad_settings_are_one_clear_sentence(method, own, sentence):
    with pytest.raises(InputError) as caught:
        made(method, x={"algorithm": "gmeta", **own})
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "near"),
    [("qqq", ""), ("lamda", ""), ("wieght", "; did you mean 'methods.ditto.weight'?")],
)
def test_an_unknown_key_names_all_settings_and_a_close_one_only(key, near):
    takes = ", ".join(sorted(load_config({"methods": {"ditto": {}}}).method.settings))
    with pytest.raises(InputError) as caught:
        made(ditto={key: 3})
    assert str(caught.value) == f"unknown key 'methods.ditto.{key}': ditto takes {takes}{near}"


def test_code_that_fails_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "breaks.py").write_text("raise RuntimeError('first\\nsecond')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"can't be imported \(RuntimeError: first\); modules are searched"
    ):
        made(x={"algorithm": "breaks:X"})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed distribution with entry points of every group."""
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"""
[nufed.algorithms]
own = {OWN}
broken = nowhere_:X
[nufed.aggregations]
last = {__name__}:Last
[nufed.partitions]
local = {__name__}:local
""")
    monkeypatch.syspath_prepend(tmp_path)
    registry.installed.cache_clear()
    yield
    registry.installed.cache_clear()


def test_entry_points_are_names_like_any(installed):
    found = made({"aggregation": "last"}, own={"algorithm": "own", "scale": 2}, gmeta={})
    assert found == {"own": Own(aggregation=Last(2.0)), "gmeta": GMeta(aggregation=Last())}
    with pytest.raises(
        InputError, match=r"broken is an entry point of nufed.algorithms \(nowhere_"
    ):
        made(x={"algorithm": "broken"})
    with pytest.raises(InputError, match=r"must be one of fedavg, .*, broken, own, or your own"):
        made(x={"algorithm": "nix"})
    assert made(own={}) == {"own": Own()}  # named after it


@pytest.mark.parametrize("name", ["local", f"{__name__}:local"])
def test_partitions_of_ones_own(installed, name):
    data = {"partition": name, "partition_args": {"shift": 5}, "agents": 3}
    config = load_config({"data": data}).data
    split = build_split(config, build_samples(config), seed=0)
    rows = [sorted([*split.train[a], *split.test[a]]) for a in range(3)]
    assert rows == [list(range(a + 5, a + 25)) for a in range(3)]
    for args, sentence in (
        ({"shift": -9}, "gave agent 0 rows that are not distinct numbers in 0 … 1796"),
        ({"nix": 1}, f"data.partition_args = {{'nix': 1}}: the partition '{name}' takes shift"),
        ({"shift": "x"}, "fails with arguments {'shift': 'x'}: "),
    ):
        with pytest.raises(InputError, match=sentence):
            bad = load_config({"data": data | {"partition_args": args}}).data
            build_split(bad, build_samples(bad), seed=0)
    with pytest.raises(
        InputError, match=r"data.partition = 'loca': must be one of auto, dirichlet"
    ):
        load_config({"data": {"partition": "loca"}})


def test_a_partition_may_name_its_agents_and_takes_keys_of_data_by_name():
    for dirichlet, classes in ((30.0, 20), (40.0, 50)):
        data = {
            "partition": f"{__name__}:lopsided",
            "dirichlet": dirichlet,
            "classes_per_agent": classes,
        }
        config = load_config({"data": data}).data
        split = build_split(config, build_samples(config), seed=0)
        assert split.names == (f"size {classes}", f"size {dirichlet:.0f}")
        sizes = [len(split.train[a]) + len(split.test[a]) for a in range(2)]
        assert sizes == [classes, dirichlet]


@pytest.mark.parametrize("name", PARTITIONS)
def test_built_in_partitions_have_the_signature_of_ones_own(name):
    owners = np.arange(60) % 4
    samples = Samples(torch.zeros(60, 2), torch.arange(60) % 3, ("a", "b", "c"), owners)
    config = load_config({"data": {"partition": name, "agents": 4, "dirichlet": 0.7}}).data
    settings = settings_taken(PARTITIONS[name], config.partition_settings)
    dealt = PARTITIONS[name](samples, 4, None, stream(5, "partition"), **settings)
    rows, _ = check_dealt(dealt, 60, 4)
    split = build_split(config, samples, seed=5)
    assert [sorted([*split.train[a], *split.test[a]]) for a in range(4)] == list(map(sorted, rows))
    bad = load_config({"data": {"partition": name, "agents": 4, "partition_args": {"nix": 1}}})
    with pytest.raises(InputError, match=f"{{'nix': 1}}: the partition '{name}' takes "):
        build_split(bad.data, samples, seed=5)
    if name not in ("iid", "quantity_skew"):
        plain = Samples(torch.zeros(60, 2), torch.zeros(60))
        with pytest.raises(InputError, match=f"'{name}': this data has no (classes|owners)"):
            build_split(config, plain, seed=5)


def test_a_registry_finds_no_code_that_was_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(InputError, match="its module is not imported"):
        ALGORITHMS.find("algorithm", "this:s")
    assert "this" not in sys.modules
