"""Whole runs: reproducible, blind to test data, with the user's own model and data."""

import inspect
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import nufed
from nufed import InputError
from nufed.algorithms.aggregation import Mean
from nufed.errors import TrainingError
from nufed.lab.config import load_config, problem as build
from nufed.lab.config.split_file import load_split, split_bytes
from nufed.lab.experiment import training
from nufed.lab.files import read_sealed
from nufed.lab.readers.sources import SOURCES
from support import context, file_hashes, json_lines, with_figures

SMALL = {
    "rounds": 4,
    "eval_every": 2,
    "save_every": 2,
    "eval_steps": 2,
    "participation": 0.5,
    "seeds": [0, 1],
    "data": {
        "agents": 6,
        "samples_per_agent": 24,
        "dirichlet": 0.5,
        "test": 0.25,
        "unseen_agents": 1,
    },
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "methods": {
        "fedavg": {"algorithm": "fedavg"},
        "exact": {"algorithm": "gmeta"},
        "hf": {"algorithm": "gmeta", "curvature": "hessian_free"},
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with with_figures():
        return nufed.run(SMALL, out=tmp_path_factory.mktemp("runs") / "small")


def test_the_same_seed_gives_the_same_files(finished, tmp_path):
    again = nufed.run(SMALL, out=tmp_path / "again")
    assert file_hashes(finished.path) == file_hashes(again.path)
    bundles = 3
    assert len(file_hashes(finished.path)) == 4 + 4 + 3 * 2 * 8 + 3 * 2 * 3 + bundles


def test_a_run_writes_all_its_files(finished):
    path = finished.path
    for seed in (0, 1):
        split = load_split(path / "splits" / f"seed-{seed}.safetensors")
        about = read_sealed(path / "splits" / f"seed-{seed}.json").about
        assert about["sha256"] == split.fingerprint
        assert [sum(a["counts"]) for a in about["agents"]] == [24] * 6
        for method in SMALL["methods"]:
            part = path / "methods" / method / f"seed-{seed}"
            lines = json_lines(part / "metrics.jsonl")
            assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
            assert [("evaluation" in line) for line in lines] == [True, False, True, False, True]
            final, saved = (
                load_file(part / name)["model"]
                for name in ("model.safetensors", "model-round-000004.safetensors")
            )
            assert torch.equal(final, saved) and final.shape == (64 * 8 + 8 + 8 * 10 + 10,)
            assert not torch.equal(
                final, load_file(part / "model-round-000002.safetensors")["model"]
            )
            assert (part / "model.safetensors").stat().st_mode & 0o044  # others may read it too
    for figure in ("rounds-seen", "rounds-unseen", "steps", "agents", "split"):
        assert (path / "figures" / f"{figure}.svg").read_text().startswith("<svg")
        assert (path / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")


def test_methods_of_a_run_use_the_same_initial_model_cohorts_and_batches(finished):
    parts = list(finished.methods.values())
    for seed in (0, 1):
        first, *others = (part[seed].metrics for part in parts)
        for other in others:
            assert [m.cohort for m in other] == [m.cohort for m in first]
            assert other[0].evaluation == first[0].evaluation
    assert parts[0][0].metrics[0].evaluation != parts[0][1].metrics[0].evaluation


def test_the_results_table_holds_methods_and_null_baselines(finished):
    rows = {(row.group, row.name): row for row in finished.rows()}
    names = {"fedavg", "exact", "hf", "majority", "local", "untrained"}
    assert set(rows) == {(g, n) for g in ("seen", "unseen") for n in names}
    scores = finished.methods["exact"]
    means = [np.mean([s.score[-1] for s in scores[seed].scores if s.seen]) for seed in (0, 1)]
    assert rows["seen", "exact"].personal.mean == pytest.approx(np.mean(means))
    starts = [np.mean([s.score[0] for s in scores[seed].scores if s.seen]) for seed in (0, 1)]
    assert rows["seen", "exact"].shared.mean == pytest.approx(np.mean(starts))
    assert np.mean(starts) != np.mean(means)
    untrained = finished.methods["fedavg"][0].metrics[0].evaluation["seen"].score
    mean = np.mean([s.score[-1] for s in finished.baselines["untrained"][0].scores if s.seen])
    assert untrained[-1] == pytest.approx(mean)
    assert math.isnan(rows["seen", "majority"].loss)
    reread = json.loads((finished.path / "results.json").read_text())
    assert [r["name"] for r in reread["rows"]] == [r.name for r in finished.rows()]


def test_costs_are_counted(finished):
    # 5 agents train, 2 a round (round half to even of 2.5), 4 rounds, τ = 4, ν = 2
    updates = 2 * 4 * 4
    size = (64 * 8 + 8 + 8 * 10 + 10) * 4
    exact, hf = finished.costs("exact"), finished.costs("hf")
    assert (exact["gradients"], exact["hvps"]) == (updates * 3, updates * 2)
    assert (hf["gradients"], hf["hvps"]) == (updates * 7, 0)
    assert exact["bytes_up"] == exact["bytes_down"] == 2 * 4 * size
    assert exact["seconds"] > 0


@pytest.mark.filterwarnings("ignore:the inputs range from")
def test_spoiling_every_test_input_changes_no_trained_model(finished, tmp_path, monkeypatch):
    clean = SOURCES["digits"]()
    inputs = clean.inputs.float() * clean.scale
    for seed in (0, 1):
        split = load_split(finished.path / "splits" / f"seed-{seed}.safetensors")
        inputs_of_seed = inputs.clone()
        inputs_of_seed[np.concatenate(split.test)] = 1e30
        spoiled = nufed.Samples(inputs_of_seed, clean.targets, clean.classes)
        run = nufed.run({**SMALL, "seeds": [seed]}, data=spoiled, out=tmp_path / str(seed))
        for method in SMALL["methods"]:
            models = [
                load_file(p / "methods" / method / f"seed-{seed}" / "model.safetensors")["model"]
                for p in (finished.path, run.path)
            ]
            assert torch.equal(*models)
        # and the test data was indeed spoiled
        assert all(s.loss[-1] > 1e20 for s in run.methods["exact"][seed].scores)


def test_non_finite_numbers_are_refused_before_anything_is_written(finished, tmp_path, monkeypatch):
    clean = SOURCES["digits"]()
    split = load_split(finished.path / "splits" / "seed-0.safetensors")
    out, config = tmp_path / "run", {**SMALL, "seeds": [0]}
    for part in (split.train, split.test):
        for bad in (math.nan, 1e300):
            inputs, row = clean.inputs.double(), int(part[1][0])
            inputs[row, 3, 3] = bad
            with pytest.raises(InputError, match=rf"sample {row} .* holds (NaN|1e\+300)"):
                nufed.run(config, data=(inputs, clean.targets), out=out)
    (tmp_path / "broken_source.py").write_text(
        "import numpy as np\n"
        "def load():\n    return np.array([[1.0], [2.0]]), np.array([[1.0], [np.nan]])\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"the target of sample 1 .* holds NaN"):
        nufed.run({**config, "data": {"source": "broken_source:load"}}, out=out)
    assert not out.exists()


def test_own_model_data_loss_and_metric(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    owners = np.repeat(["ann", "bob", "cho", "dee"], 30)
    y = (x @ rng.normal(size=(3, 1)) + (owners == "bob")[:, None]).astype(np.float32)

    def closeness(outputs, targets):
        return 1 / (1 + (outputs - targets).abs().mean())

    config = {**SMALL, "data": {"partition": "given"}, "model": {}, "seeds": [0]}
    run = nufed.run(
        config,
        data=(x, y, owners),
        model=lambda: nn.Linear(3, 1),
        loss=nn.functional.huber_loss,
        metric=closeness,
        out=tmp_path / "own",
    )
    assert run.measure.name == "closeness" and run.agents == 4
    assert [s.name for s in run.methods["exact"][0].scores] == ["ann", "bob", "cho", "dee"]
    first, last = (run.methods["exact"][0].metrics[i].evaluation["seen"] for i in (0, -1))
    assert last.score[-1] > first.score[-1] and "majority" not in run.baselines
    config_text = (run.path / "config.toml").read_text()
    assert 'name = "given in Python"' in config_text and 'loss = "given in Python"' in config_text


def test_regression_is_scored_by_its_loss(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(144, 3)).astype(np.float32)
    y = (x @ rng.normal(size=3)).astype(np.float32)  # one-dimensional: must not broadcast
    data = {**SMALL["data"], "partition": "iid"}
    run = nufed.run(
        {**SMALL, "data": data, "model": {"name": "logistic"}}, data=(x, y), out=tmp_path / "r"
    )
    assert run.measure.name == "loss" and not run.measure.higher_is_better
    best = run.rows()[0]
    assert best.personal.mean == min(r.personal.mean for r in run.rows() if r.kind == "method")
    assert best.personal.mean < 0.5 * y.var()  # it has learned something
    assert (run.path / "report.html").exists()


def test_functions_of_the_user_are_found_by_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def data(n):\n"
        "    x = torch.arange(n * 2.0).view(n, 2) / n\n"
        "    return x, (x.sum(1) > 2).long()\n"
        "def net(width):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Tanh(),"
        " torch.nn.Linear(width, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    data = {**SMALL["data"], "source": "mine:data", "args": {"n": 150}}
    config = {**SMALL, "data": data, "model": {"name": "mine:net", "args": {"width": 3}}}
    assert nufed.run(config, out=tmp_path / "run").agents == 6
    for key, name, message in [
        ("data", "mine:nothing", "data.source = 'mine:nothing' can't be imported"),
        ("data", "nowhere:data", "can't be imported"),
        ("data", "digitz", "data.source = 'digitz': must be one of digits"),
        ("model", "mine:data", "fails with arguments .*unexpected keyword"),
    ]:
        changed = {**config[key], "source" if key == "data" else "name": name}
        with pytest.raises(InputError, match=message):
            nufed.run({**config, key: changed}, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.batch_size=19", "agent 0 has 18 training samples and batch_size is 19"),
        ("data.agents=200", "200 agents with 24 samples each need 4800"),
        ("data.partition=given", "has no owners"),
        ("data.unseen_agents=6", "unseen_agents = 6"),
        ("model.name=transformer", "model.name = 'transformer': must be one of fcnn"),
        ("loss=hinge", "loss = 'hinge': must be one of cross_entropy, mse"),
        ("loss=mse", "the model, loss and metric can't be used on this data"),
        ("model.args.hidden=3", "'fcnn' fails with arguments"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(override, message, tmp_path):
    with pytest.raises(InputError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the shapes of mse itself
        nufed.run(SMALL, [override], out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


class Wrapped(torch.nn.Module):
    """Gives an object that holds its outputs."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, x):
        return SimpleNamespace(scores=self.inner(x))


def linear():
    return torch.nn.Linear(4, 3)


X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3
HF = SimpleNamespace(column_names=["pixels", "label"], with_format=lambda kind: None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": (X, Y.astype("float32")), "loss": F.cross_entropy}, "are floating-point numbers"),
        ({"data": (X, Y[:, None]), "loss": F.cross_entropy}, r"shape \(60, 1\): .*reshape\(-1\)"),
        ({"data": (X.astype(int), Y)}, r"the inputs are int64, .*astype\("),
        ({"data": (X, Y), "model": Wrapped}, "a SimpleNamespace .* returns one of its tensors"),
        ({"data": HF}, r"a Hugging Face .*\['pixels', 'label'\]\): give arrays of its columns"),
    ],
)
def test_data_and_outputs_of_another_form_get_one_sentence(given, message, tmp_path):
    config = {"data": {"agents": 3, "partition": "iid"}, "method": {"batch_size": 4}}
    with pytest.raises(InputError, match=message):
        nufed.run(config, out=tmp_path / "no", **{"model": linear, **given})
    assert not (tmp_path / "no").exists()


def test_a_label_beyond_the_outputs_is_named_before_training(tmp_path):
    owners = np.repeat(["a", "b", "c"], 20)
    wrong = np.where(np.arange(60) == 47, 5, Y)
    config = {"method": {"batch_size": 4}, "rounds": 2}
    sentence = r"sample 47 \(counted from 0, of agent 'c'\) is 5 for outputs of shape \(3,\)"
    with pytest.raises(InputError, match=sentence):
        nufed.run(config, data=(X, wrong, owners), model=linear, out=tmp_path / "no")
    with pytest.raises(InputError, match="is 7 for outputs of shape"):  # all labels are too large
        nufed.run(config, data=(X, Y + 5, owners), model=linear, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_metric_that_is_no_number_is_not_called_divergence(tmp_path):
    def of_ones(outputs, targets):
        return (outputs.argmax(dim=1)[targets == 1] == 1).double().mean()

    owners = np.repeat(["a", "b", "c", "d"], 15)
    labels = np.where(np.isin(owners, ["b", "d"]), 0, Y)
    config = {"method": {"batch_size": 4}, "rounds": 2, "eval_every": 1}
    given = {"data": (X, labels, owners), "model": linear, "metric": of_ones}
    run = nufed.run(config, out=tmp_path / "run", **given)
    (said,) = [str(warning) for warning in run.warnings() if warning.about == "training"]
    assert "of_ones is NaN for agents b, d, whose loss is finite" in said
    assert "diverged" not in said and "meta_lr" not in said


def test_divergence_stops_with_a_clear_error_and_keeps_finished_rounds(tmp_path):
    with pytest.raises(TrainingError, match=r"round \d .*not finite.*lower meta_lr"):
        nufed.run(SMALL, ["method.meta_lr=1e30"], out=tmp_path / "diverged")
    assert (tmp_path / "diverged" / "config.toml").exists()


def test_a_method_that_diverges_is_named_and_the_others_continue(tmp_path):
    run = nufed.run(SMALL, ["methods.exact.meta_lr=1e30"], out=tmp_path / "run")
    assert set(run.methods) == {"fedavg", "hf"}
    assert len(run.failures) == 2 and "exact, seed 0: round" in run.failures[0]
    assert "Could not be trained" in (run.path / "report.html").read_text()


def test_divergence_while_fine_tuning_is_shown_not_hidden(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(144, 3)).astype(np.float32)
    data = {**SMALL["data"], "partition": "iid"}
    config = {**SMALL, "data": data, "model": {"name": "logistic"}, "seeds": [0]}
    run = nufed.run(
        config, ["methods.fedavg.adapt_lr=1e30"], data=(x, x[:, :1]), out=tmp_path / "run"
    )
    rows = {row.name: row for row in run.rows() if row.group == "seen"}
    assert not math.isfinite(rows["fedavg"].personal.mean) and rows["fedavg"].harmed == 1
    assert "diverged" in (run.path / "report.html").read_text()


def test_settings_take_effect(tmp_path, monkeypatch):
    seen = []
    original = training.Training

    def spy(algorithm, engine, *arguments, **keywords):
        seen.append((algorithm, engine.federation))
        return original(algorithm, engine, *arguments, **keywords)

    monkeypatch.setattr(training, "Training", spy)
    overrides = [
        "seeds=[0]",
        "workers=1",
        "rounds=1",
        "method.averaging=samples",
        "methods.hf.fd_step=1e-4",
        "data.reuse=across_agents",
        "data.small_agents=use_all",
        "data.agents=90",
        "method.batch_size=50",
        "participation=0.1",
    ]
    run = nufed.run(SMALL, overrides, out=tmp_path / "run")
    algorithms = {name: a for name, (a, _) in zip(SMALL["methods"], seen, strict=True)}
    assert {a.aggregation for a in algorithms.values()} == {Mean("samples")}
    assert algorithms["hf"].curvature == nufed.HessianFree(1e-4)
    assert seen[0][1].small_agents == "use_all" and run.agents == 90  # 90 · 24 > 1797: shared


def test_steps_evaluated_follow_the_steps_trained_for():
    config = {k: v for k, v in SMALL.items() if k != "eval_steps"}
    assert load_config(config).steps_evaluated == 2
    assert load_config(config, ["method.adapt_steps=5"]).steps_evaluated == 5
    assert load_config(config, ["eval_steps=0"]).steps_evaluated == 0
    more = load_config(config, ["methods.hf.eval_steps=[1, 7]"])
    assert (more.steps_evaluated, more.steps_shown, more.steps_of("hf")) == (7, 2, [1, 7])


def test_methods_are_shown_after_their_own_numbers_of_steps(tmp_path):
    overrides = ["methods.hf.eval_steps=[2, 1]", "methods.fedavg.eval_steps=[0]", "seeds=[0]"]
    run = nufed.run(SMALL, [*overrides, "baselines=[]"], out=tmp_path / "run")
    shown = {row.name: row.personal.mean for row in run.rows() if row.group == "seen"}
    for label, method, step in (
        ("hf after 2 steps", "hf", 2),
        ("hf after 1 step", "hf", 1),
        ("fedavg after 0 steps", "fedavg", 0),
        ("exact", "exact", 2),
    ):
        scores = [s.score[step] for s in run.methods[method][0].scores if s.seen]
        assert shown[label] == pytest.approx(np.mean(scores))
    page = (run.path / "report.html").read_text("utf-8")
    assert "hf after 1 step" in page
    assert run.baselines == {}


def test_the_results_say_what_lies_above_the_majority(finished):
    for row in finished.rows():
        majority = next(r for r in finished.rows() if (r.name, r.group) == ("majority", row.group))
        assert row.above_majority.mean == pytest.approx(row.personal.mean - majority.personal.mean)
        assert 0 <= row.balanced.mean <= 1


def test_scoring_on_validation_data_needs_some(tmp_path):
    with pytest.raises(InputError, match=r"eval_on = .* agent '0' has no validation part"):
        nufed.run(SMALL, ["eval_on=validation"], out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    overrides = ["eval_on=validation", "data.validation=0.2", "seeds=[0]", "rounds=2"]
    run = nufed.run(SMALL, overrides, out=tmp_path / "run")
    assert "Validation accuracy of personal models" in (run.path / "report.html").read_text("utf-8")
    sizes = {s.test_samples for s in run.methods["exact"][0].scores}
    assert sizes == {agent.validation for agent in run.splits[0].agents}


def test_the_local_baseline_trains_on_its_own_for_all_rounds(finished):
    engine = nufed.simulation.DirectEngine(*problem(finished, seed=0))
    local = nufed.fedavg(adapt_lr=0.1, meta_lr=0.1, batch_size=6, local_steps=4 * 4)
    w = engine.objective.initial()
    (result,) = engine.agent_updates(local, {"model": w}, {2: {}}, context(1)).values()
    (scores,) = engine.evaluate(
        local, result.vectors, {2: {}}, steps=2, measure=nufed.evaluate.Measure("accuracy")
    )
    of_run = finished.baselines["local"][0].scores[2]  # from another engine, equal to rounding
    assert scores.score == of_run.score
    assert scores.loss == pytest.approx(of_run.loss, rel=1e-5)


def problem(run, seed):
    """The objective, federation and seed of a run, rebuilt from its configuration."""
    samples = build.build_samples(run.config.data)
    module = build.build_module(run.config, samples, seed)
    objective = build.build_objective(run.config, module, build.build_loss(run.config, samples))
    return objective, build.build_federation(run.config, samples, seed), seed


def test_a_model_by_path_and_as_an_object_start_alike_and_stay_untouched(tmp_path, monkeypatch):
    (tmp_path / "same.py").write_text(
        "from torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import same

    module = same.net()
    config = {**SMALL, "seeds": [0], "rounds": 1, "model": {}}
    by_path = nufed.run({**config, "model": {"name": "same:net"}}, out=tmp_path / "path")
    by_object = nufed.run(config, model=same.net, out=tmp_path / "object")
    nufed.run(config, model=module, out=tmp_path / "instance")
    assert by_path.to_json() == by_object.to_json()
    assert module[1].weight.dtype == torch.float64  # the run was in float32


def test_owners_make_a_natural_split_by_themselves(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(90, 3)), np.arange(90) % 3
    config = {**SMALL, "data": {}, "model": {"name": "logistic"}, "seeds": [0], "rounds": 1}
    run = nufed.run(config, data=(x, y, np.arange(90) % 5), out=tmp_path / "run")
    assert run.agents == 5


def test_a_saved_split_is_used_as_it_is(finished, tmp_path):
    split = finished.path / "splits" / "seed-{seed}.safetensors"
    again = nufed.run(SMALL, [f"data.split_file={split}", "data.agents=2"], out=tmp_path / "again")
    assert again.to_json() == finished.to_json()
    with pytest.raises(InputError, match="outside of the data, rows 0 … 99; give"):
        nufed.run(
            SMALL,
            [f"data.split_file={split}"],
            data=(np.zeros((100, 64)), np.arange(100) % 10),
            out=tmp_path / "no",
        )


def test_a_split_that_tests_on_training_rows_is_refused(finished, tmp_path):
    split = load_split(finished.path / "splits" / "seed-0.safetensors")
    leaking = replace(split, test=[rows[: len(rows) // 4] for rows in split.train])
    (tmp_path / "split.safetensors").write_bytes(split_bytes(leaking))
    config = {**SMALL, "seeds": [0], "data": {"split_file": str(tmp_path / "split.safetensors")}}
    with pytest.raises(InputError, match="training and scored parts must be disjoint"):
        nufed.run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_agent_without_a_part_to_score_on_is_named(finished, tmp_path):
    split = load_split(finished.path / "splits" / "seed-0.safetensors")
    without = replace(split, test=[*split.test[:-1], split.test[-1][:0]])
    (tmp_path / "s.safetensors").write_bytes(split_bytes(without))
    config = {**SMALL, "seeds": [0], "data": {"split_file": str(tmp_path / "s.safetensors")}}
    with pytest.raises(InputError, match=f"agent '{len(split.names) - 1}' has no test part"):
        nufed.run(config, out=tmp_path / "run")


def test_threads_are_set_and_restored(tmp_path, monkeypatch):
    used = []
    original = training.Training

    def spy(*arguments, **keywords):
        used.append(torch.get_num_threads())
        return original(*arguments, **keywords)

    monkeypatch.setattr(training, "Training", spy)
    torch.set_num_threads(2)
    nufed.run({**SMALL, "seeds": [0]}, ["rounds=1", "threads=3"], out=tmp_path / "run")
    assert set(used) == {3} and torch.get_num_threads() == 2


def test_no_path_of_the_machine_is_recorded(finished):
    home = str(Path.home())
    for file in finished.path.rglob("*.json*"):
        assert home not in file.read_text()


def test_a_fixed_sample_of_agents_is_evaluated_and_said_so(tmp_path):
    config = {**SMALL, "seeds": [0], "eval_agents": 2}
    config["data"] = {**SMALL["data"], "agents": 12, "unseen_agents": 5}
    run = nufed.run(config, out=tmp_path / "run")
    everyone = [*run.methods.values(), *run.baselines.values()]
    agents = {tuple(score.agent for score in seeds[0].scores) for seeds in everyone}
    (chosen,) = agents  # the same for every method and baseline
    split = load_split(run.path / "splits" / "seed-0.safetensors")
    assert [agent in split.unseen for agent in chosen] == [False, False, True, True]
    report = (run.path / "report.html").read_text()
    assert "a fixed sample of 2 of 7 agents seen in training" in report


def test_many_agents_who_share_samples(tmp_path):
    config = {**SMALL, "seeds": [0], "eval_agents": 3, "rounds": 1, "participation": 5e-5}
    config["data"] = {"agents": 100_000, "samples_per_agent": 24, "reuse": "across_agents"}
    run = nufed.run(config, out=tmp_path / "run")
    assert run.agents == 100_000
    lines = (run.path / "methods" / "fedavg" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    cohort = json.loads(lines[1])["cohort"]
    assert len(cohort) == 5 and max(cohort) > 1000
    assert sum(f.stat().st_size for f in (run.path / "splits").iterdir()) < 10**6
    split = run.path / "splits" / "seed-{seed}.safetensors"
    again = nufed.run(config, [f"data.split_file={split}"], out=tmp_path / "again")
    assert again.to_json() == run.to_json()


def test_the_engine_of_every_method_is_recorded(finished, tmp_path):
    assert set(finished.engines) == set(SMALL["methods"])
    assert set(finished.engines.values()) == {"batched"}
    direct = nufed.run({**SMALL, "seeds": [0]}, ["engine=direct", "rounds=1"], out=tmp_path / "run")
    assert set(direct.engines.values()) == {"direct"}
    assert "direct" in (direct.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine=fast", "engine = 'fast'"),
        ("workers=0", "workers = 0"),
        ("device=toaster", "device = 'toaster': torch can't use it here"),
        ("eval_agents=0", "eval_agents = 0"),
    ],
)
def test_bad_settings_of_engines_are_refused(override, message, tmp_path):
    with pytest.raises(InputError, match=message):
        nufed.run(SMALL, [override], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_processes_and_threads_do_not_mix(tmp_path):
    with pytest.raises(InputError, match="workers = 2: must be 1, because threads = 2"):
        nufed.run(SMALL, ["workers=2", "threads=2"], out=tmp_path / "run")


@pytest.mark.parametrize("function", ["run", "resume", "sweep", "resume_sweep", "tune"])
def test_what_all_calls_take_is_in_their_signatures_and_nothing_else_is_taken(function):
    called = getattr(nufed, function)
    options = {"model", "data", "loss", "metric", "methods", "partition", "ray", "on_stop"}
    shown = inspect.signature(called).parameters
    assert options < shown.keys() and "options" not in shown
    assert all(shown[name].default is None for name in options)
    with pytest.raises(TypeError, match="unexpected argument 'modle'; did you mean 'model'"):
        called("quickstart", modle=None)
