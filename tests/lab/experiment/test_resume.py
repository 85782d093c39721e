"""A stopped, killed or damaged run resumes to the same bits as an uninterrupted one."""

import json
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import nufed
from nufed import InputError
from nufed.errors import NumericalWarning, RunError
from nufed.lab.report.tables import methods_table
from nufed.lab.runs import load_run
from processes import NUFED, wait_for
from support import Killed, file_hashes, without_report

CONFIG = {
    "rounds": 9,
    "eval_every": 4,
    "checkpoint_every": 2,
    "participation": 0.5,
    "seeds": [0, 1],
    "workers": 1,
    "data": {"agents": 6, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "methods": {
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
        "hf": {"algorithm": "gmeta", "curvature": "hessian_free"},
        "scaffold": {},  # agents of these two keep a state
        "ditto": {},
    },
}


def killed_after(events):
    """A listener that kills the run after so many events."""

    def listener(event):
        nonlocal events
        events -= 1
        if events < 0:
            raise Killed

    return listener


def begun(path, events, config=CONFIG):
    with pytest.raises(Killed):
        nufed.run(config, out=path, on_progress=killed_after(events))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    nufed.run(CONFIG, out=path)
    return path


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(
    ("events", "during"),
    [(0, "fo"), (7, "fo"), (30, "scaffold"), (42, "ditto"), (75, "scaffold")],
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, whole, events, during):
    path = begun(tmp_path / "run", events)
    part = path / "methods" / during / f"seed-{events // 45}"
    assert not (part / "done.json").exists()
    assert any(part.glob("states/*/*.safetensors")) == (during in ("scaffold", "ditto"))
    nufed.resume(path)
    assert file_hashes(path) == file_hashes(whole)


@pytest.mark.usefixtures("no_report")
def test_learned_step_sizes_resume_to_the_same_bits(tmp_path):
    methods = {"learned": {"algorithm": "gmeta", "rates_lr": 1.0, "curvature": "first_order"}}
    config = {**CONFIG, "rounds": 5, "seeds": [0], "methods": methods, "baselines": []}
    nufed.run(config, out=tmp_path / "whole")
    path = begun(tmp_path / "run", 5, config)
    saved = load_file(sorted(path.glob("methods/*/seed-0/checkpoint-*.safetensors"))[-1])
    assert set(saved) == {"model", "log_rates"}
    nufed.resume(path)
    assert file_hashes(path) == file_hashes(tmp_path / "whole")
    final = load_file(path / "methods" / "learned" / "seed-0" / "model.safetensors")
    assert not torch.equal(final["log_rates"], saved["log_rates"])
    shown = dict(methods_table([load_run(path)]).rows)
    assert shown["adapt_lr (α)"] == "0.1" and shown["rates_lr"] == "1"


@pytest.mark.usefixtures("no_report")
def test_residuals_of_compression_resume_to_the_same_bits(tmp_path):
    methods = {"fo": {"algorithm": "gmeta", "curvature": "first_order"}}
    config = {**CONFIG, "rounds": 5, "seeds": [0], "methods": methods, "baselines": []}
    config["compression"] = {"codec": "top_k", "share": 0.1}
    nufed.run(config, out=tmp_path / "whole")
    path = begun(tmp_path / "run", 5, config)
    saved = [load_file(each) for each in path.glob("methods/*/seed-0/states/*/*.safetensors")]
    assert any("residual/model" in name for state in saved for name in state)
    nufed.resume(path)
    assert file_hashes(path) == file_hashes(tmp_path / "whole")


@pytest.mark.usefixtures("no_report")
def test_it_may_be_killed_repeatedly(tmp_path, whole):
    path = begun(tmp_path / "run", 2)
    for events in (1, 4, 9, 3):
        with pytest.raises(Killed):
            nufed.resume(path, on_progress=killed_after(events))
    nufed.resume(path)
    assert file_hashes(path) == file_hashes(whole)


def test_finished_parts_are_skipped(tmp_path, whole):
    path = shutil.copytree(whole, tmp_path / "run")
    seen = []
    nufed.resume(path, on_progress=seen.append)
    assert all(event.starts for event in seen)  # every part is only looked at
    assert {event.round for event in seen} == {0, CONFIG["rounds"]}  # 0: the null baselines
    assert file_hashes(path) == file_hashes(whole)


@pytest.fixture(scope="module")
def seven_rounds(tmp_path_factory):
    with without_report():
        return nufed.run({**CONFIG, "rounds": 7}, out=tmp_path_factory.mktemp("seven") / "run").path


@pytest.mark.usefixtures("no_report")
def test_training_longer_gives_the_bits_of_a_longer_run(tmp_path, whole, seven_rounds):
    """Round 8 is evaluated by schedule, round 7 only because it is the last."""
    path = shutil.copytree(seven_rounds, tmp_path / "run")
    for rounds in (8, 9):
        nufed.resume(path, [f"rounds={rounds}"])
    assert file_hashes(path) == file_hashes(whole)


def undo_the_end(part):
    """A part killed between its last checkpoint and its end, with temporary files."""
    for name in ("done.json", "agents.jsonl", "model.safetensors"):
        (part / name).unlink()
    (part / ".agents.jsonl.tmp").write_bytes(b"{")
    (part / "checkpoint-000001.safetensors").write_bytes(b"")


def test_a_part_killed_between_its_last_checkpoint_and_its_end_is_finished(tmp_path, whole):
    path = shutil.copytree(whole, tmp_path / "run")
    undo_the_end(path / "methods" / "fo" / "seed-1")
    nufed.resume(path)
    assert file_hashes(path) == file_hashes(whole)


@pytest.mark.usefixtures("no_report")
def test_such_a_part_can_be_trained_longer(tmp_path, whole, seven_rounds):
    path = shutil.copytree(seven_rounds, tmp_path / "run")
    undo_the_end(path / "methods" / "fo" / "seed-1")
    nufed.resume(path, ["rounds=9"])
    assert file_hashes(path) == file_hashes(whole)


@pytest.mark.usefixtures("no_report")
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, whole):
    path = begun(tmp_path / "run", 18)
    (newest,) = sorted(path.glob("methods/*/seed-*/checkpoint-*.safetensors"))[-1:]
    newest.write_bytes(newest.read_bytes()[:-3])
    with pytest.warns(NumericalWarning, match=rf"{newest.stem}.*is damaged"):
        nufed.resume(path)
    assert file_hashes(path) == file_hashes(whole)


def test_only_rounds_may_be_increased(tmp_path):
    path = begun(tmp_path / "run", 5)
    for overrides in (["rounds=3"], ["method.adapt_lr=0.2"], ["seeds=[0]"]):
        with pytest.raises(InputError, match="only rounds may be increased, from 9"):
            nufed.resume(path, overrides)


def test_a_changed_configuration_or_other_data_is_refused(tmp_path):
    path = begun(tmp_path / "run", 5)
    config = path / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("adapt_lr = 0.1", "adapt_lr = 0.3"))
    with pytest.raises(RunError, match=r"method.adapt_lr was 0.1 and is 0.3"):
        nufed.resume(path)
    config.write_text(text)
    rng = np.random.default_rng(0)
    other = (rng.normal(size=(300, 8)).astype(np.float32), rng.integers(0, 3, 300))
    with pytest.raises(RunError, match=r"data.source was 'digits'"):
        nufed.resume(path, data=other)


@pytest.mark.usefixtures("no_report")
def test_other_data_of_the_same_name_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 8)).astype(np.float32), rng.integers(0, 3, 300)
    config = {**CONFIG, "data": {**CONFIG["data"], "agents": 4}}
    with pytest.raises(Killed):
        nufed.run(config, out=tmp_path / "run", data=(x, y), on_progress=killed_after(5))
    x[3, 2] += 1
    with pytest.raises(RunError, match="the data is not that of"):
        nufed.resume(tmp_path / "run", data=(x, y))
    x[3, 2] -= 1
    nufed.resume(tmp_path / "run", data=(x, y))


@pytest.mark.usefixtures("no_report")
def test_a_directory_in_use_or_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run directory"):
        nufed.resume(tmp_path)
    path = begun(tmp_path / "run", 5)
    with pytest.raises(RunError, match=r"resume its run with `nufed run --resume "):
        nufed.run(CONFIG, out=path)

    def second(event):
        with pytest.raises(RunError, match="in use by another run"):
            nufed.resume(path)

    nufed.resume(path, on_progress=second)


def settings(path, **changed):
    """The configuration as a file, with more rounds, to allow time for a kill."""
    methods = {name: CONFIG["methods"][name] for name in ("fo", "scaffold")}
    tables = {**CONFIG, "rounds": 80, "seeds": [0], "methods": methods, **changed}
    lines = [f"{k} = {json.dumps(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name in ("data", "method"):
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in tables[name].items())]
    lines += ["[model]", "args = { hidden = [8] }"]
    for name, own in tables["methods"].items():
        lines += [f"[methods.{name}]", *(f"{k} = {json.dumps(v)}" for k, v in own.items())]
    path.write_text("\n".join(lines))
    return path


def evaluated_twice(part):
    metrics = part / "metrics.jsonl"
    return metrics.exists() and len(metrics.read_text().splitlines()) > 1


@pytest.mark.usefixtures("no_report")
def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    file = settings(tmp_path / "run.toml", workers=2, checkpoint_every=80)
    call = [*NUFED, "run", file, "--out", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(call, text=True, cwd=tmp_path, **pipes) as process:
        wait_for(lambda: any(map(evaluated_twice, tmp_path.glob("run/methods/*/seed-0"))))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130 and "resume with: nufed run --resume run" in said, said
    saved = list(tmp_path.glob("run/methods/*/seed-*/checkpoint-*.safetensors"))
    assert saved  # by the interruption: the next one is due with the last round
    nufed.resume(tmp_path / "run")
    for checkpoint in saved:
        checkpoint.unlink()
    nufed.run(str(file), out=tmp_path / "whole")
    assert file_hashes(tmp_path / "run") == file_hashes(tmp_path / "whole")
