import tomllib

import pytest
from hypothesis import given, strategies as st

from nufed import Exact, FirstOrder, GMeta, HessianFree, InputError, fedavg, per_fedavg
from nufed.lab.config import load_config, presets
from nufed.lab.config.load import known_keys


def test_precedence_is_command_line_over_file_over_default(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('rounds = 7\n[method]\nmeta_lr = 0.5\n[data]\nsource = "digits"\n')
    config = load_config(file, ["method.meta_lr=0.25", "data.partition=iid"])
    assert (config.rounds, config.method.meta_lr, config.participation) == (7, 0.25, 0.2)
    assert config.data.partition == "iid"


def test_shared_settings_reach_every_method_that_takes_them():
    config = load_config("quickstart", ["method.adapt_steps=5", "methods.gmeta-fo.meta_lr=0.9"])
    methods = config.algorithms()
    shared = {"adapt_lr": 0.05, "meta_lr": 0.3, "local_steps": 4, "batch_size": 10}
    assert methods == {
        "fedavg": fedavg(**shared),
        "per-fedavg": per_fedavg(curvature=FirstOrder(), **shared),
        "gmeta-fo": GMeta(5, curvature=FirstOrder(), **{**shared, "meta_lr": 0.9}),
        "gmeta-hf": GMeta(5, curvature=HessianFree(), **shared),
        "gmeta-exact": GMeta(5, curvature=Exact(), **shared),
    }


def test_learned_step_sizes_can_be_switched_on_and_off_by_method():
    methods = {
        "on": {"algorithm": "gmeta"},
        "off": {"algorithm": "gmeta", "rates_lr": 0.0},
        "fedavg": {"algorithm": "fedavg"},
    }
    config = load_config({"method": {"rates_lr": 0.5}, "methods": methods})
    assert [a.rates_lr for a in config.algorithms().values()] == [0.5, 0.0, 0.0]
    assert load_config(tomllib.loads(config.to_toml())) == config


def test_defaults_are_written_out_and_order_does_not_matter():
    plain, same = load_config({}), load_config({"method": {"rates_lr": 0.0, "local_steps": 4}})
    assert plain == same and plain.fingerprint == same.fingerprint
    other = load_config({"method": {"adapt_lr": 0.01, "rates_lr": 0.5}})
    assert other.fingerprint != plain.fingerprint
    assert tomllib.loads(plain.to_toml())["method"] == {
        "algorithm": "gmeta",
        "adapt_steps": 1,
        "adapt_lr": "auto",
        "meta_lr": "auto",
        "local_steps": 4,
        "batch_size": 40,
        "curvature": "exact",
        "aggregation": "mean",
        "averaging": "uniform",
        "rates_lr": 0.0,
        "rates": "tensor",
        "outer_samples": "independent",
        "inner_batches": "independent",
        "local_epochs": 0,
        "optimizer": "sgd",
        "optimizer_state": "fresh",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip_norm": 0.0,
        "schedule": "constant",
        "schedule_rounds": 100,
        "server_optimizer": "none",
    }


@pytest.mark.parametrize("preset", presets())
def test_the_resolved_configuration_reads_back_as_itself(preset):
    config = load_config(preset)
    assert load_config(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "method.adapt_stepz=3",
            "unknown key 'method.adapt_stepz': the methods of this run (fedavg, per-fedavg, gmeta-",
        ),
        ("method.adapt_stepz=3", "weight_decay; did you mean 'method.adapt_steps'?"),
        ("data.qqq=3", "unknown key 'data.qqq'; `nufed list` shows all keys"),
        ("method.rounds=3", "method.rounds = 3: is for all methods: write it at the top"),
        ("adapt_steps=3", "unknown key 'adapt_steps'; did you mean 'method.adapt_steps'?"),
        ("methods.gmeta-fo.stepz=1", "unknown key 'methods.gmeta-fo.stepz'"),
        ("qqq=1", "unknown key 'qqq'; `nufed list` shows all keys"),
        ("method.adapt_steps=-1", "method.adapt_steps = -1: must be a whole number, 0 or more"),
        ("participation=0", "participation = 0: must be a number above 0 and at most 1"),
        ("method.fd_step=0", 'method.fd_step = 0: must be "auto" or a finite number, above 0'),
        ("method.algorithm=''", "method.algorithm = '': must be one of fedavg"),
        ("rounds=many", "rounds = 'many': must be a valid integer"),
        ("method.fd_step=small", "method.fd_step = 'small': must be \"auto\" or a finite number"),
        (
            "methods.fedavg.adapt_steps=2",
            "methods.fedavg.adapt_steps = 2: fedavg has no such setting",
        ),
        (
            "methods.fedavg.rates_lr=0.1",
            "methods.fedavg.rates_lr = 0.1: fedavg has no such setting",
        ),
        ("methods.x.algorithm=fedavgg", "methods.x.algorithm = 'fedavgg': must be one of fedavg"),
        ("seeds=[]", "seeds = []: must be a list of at least one value"),
        ("seeds=[1,1]", "seeds = [1, 1]: seeds must be distinct"),
        ("name=../up", "name = '../up': must be made of letters"),
        ("methods.'../up'.meta_lr=1", "methods"),
        ("data=3", "data = 3: must be a table"),
        ("rounds.x=3", "rounds is a value, not a table"),
        ("rounds", "'rounds' is not an override"),
        ("method.meta_lr=nan", "method.meta_lr = 'nan': must be a finite number"),
        ("data.test=1.0", "data.test = 1.0: must be a number above 0 and below 1"),
    ],
)
def test_bad_settings_are_one_clear_sentence(override, sentence):
    with pytest.raises(InputError) as caught:
        load_config("quickstart", [override])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_sources_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"'nosuch' is neither a preset \(.*quickstart.*\) nor"):
        load_config("nosuch")
    with pytest.raises(InputError, match="did you mean 'quickstart'"):
        load_config("quickstrat")
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match="is not valid TOML"):
        load_config(tmp_path / "broken.toml")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


@given(st.sampled_from(list(known_keys())), VALUES)
def test_any_value_is_accepted_or_refused_in_one_sentence(key, value):
    tables = {}
    *outer, last = key.split(".")
    inner = tables
    for part in outer:
        inner = inner.setdefault(part, {})
    inner[last] = value
    try:
        load_config(tables)
    except InputError as error:
        assert last in str(error) and "\n" not in str(error)


def test_an_attack_called_nan_needs_no_quotes():
    assert load_config("quickstart", ["faults.attack=nan"]).faults.attack == "nan"
