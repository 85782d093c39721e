"""config.toml and the sealed run.json agree, or the difference is named before anything is done."""

import json
import shutil

import pytest

import nufed as library
from nufed.errors import NumericalWarning, RunError
from nufed.report.tables import settings_table
from nufed.runs import begun, load_run
from nufed.runs.durable import read_signed, signed, write_durably
from support import file_hashes
from test_resume import Killed

CONFIG = {
    "rounds": 3,
    "eval_every": 2,
    "checkpoint_every": 2,
    "participation": 0.5,
    "workers": 1,
    "baselines": ["majority"],
    "data": {"agents": 6, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "methods": {"fo": {"curvature": "first_order"}, "exact": {}},
}


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(
        "nufed.report.build_report", lambda *_, **__: None
    )  # takes most of the time


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nufed.report.build_report", lambda *_, **__: None)
        return library.run(CONFIG, out=tmp_path_factory.mktemp("finished") / "run").path


@pytest.fixture
def run(tmp_path, finished):
    return shutil.copytree(finished, tmp_path / "run")


def edit(run, before, after):
    config = run / "config.toml"
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after, 1))


CHANGES = [
    ("rounds = 3", "rounds = 5000", "rounds was 3 and is 5000"),
    ("rounds = 3", "rounds = 2", "rounds was 3 and is 2"),
    ("adapt_lr = 0.1", "adapt_lr = 0.9", "method.adapt_lr was 0.1 and is 0.9"),
    # what a method does not set is that of [method], also where it is the default
    ("[methods.exact]", "[methods.exact]\nadapt_lr = 0.01", "methods.exact.adapt_lr was None"),
    (
        '[methods.fo]\ncurvature = "first_order"\n\n[methods.exact]',
        '[methods.exact]\n\n[methods.fo]\ncurvature = "first_order"',
        r"the order of methods was \['fo', 'exact'\]",
    ),
    ("agents = 6", "agents = 7", "data.agents was 6 and is 7"),
    ('loss = "auto"', 'loss = "mse"', "loss was 'auto' and is 'mse'"),
]


@pytest.mark.parametrize(("before", "after", "words"), CHANGES)
def test_a_changed_configuration_is_refused_by_name(run, before, after, words):
    edit(run, before, after)
    with pytest.raises(RunError, match=rf"config.toml was changed \({words}") as caught:
        load_run(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "command", [["report", "run"], ["bundle", "run", "--method", "fo"], ["advise", "run"]]
)
def test_so_do_commands(run, nufed, command):
    edit(run, "adapt_lr = 0.1", "adapt_lr = 0.9")
    done = nufed(*command, cwd=run.parent)
    assert done.returncode == 2 and "adapt_lr was 0.1 and is 0.9" in done.stderr


def test_the_number_of_workers_may_change(run):
    edit(run, "workers = 1", "workers = 2")
    assert load_run(run).config.workers == 2


@pytest.mark.parametrize(("before", "after", "words"), CHANGES[1:])
def test_nothing_is_touched_when_a_changed_run_is_resumed(run, before, after, words):
    """Fewer rounds used to remove every done.json, and to ask for --resume from then on."""
    edit(run, before, after)
    files = file_hashes(run)
    with pytest.raises(RunError, match=words):
        library.resume(run)
    assert file_hashes(run) == files
    edit(run, after, before)
    library.resume(run)
    assert load_run(run).rows()


def test_a_part_with_more_rounds_than_the_run_is_left_as_it_is(run):
    """Also of a run whose run.json was made to say fewer, and sealed again."""
    edit(run, "rounds = 3", "rounds = 2")
    about = read_signed(run / "run.json")
    about["config"]["rounds"] = 2
    (run / "run.json").write_bytes(signed(about))
    with pytest.raises(RunError, match=r"done.json does not fit: it is about 3 rounds"):
        load_run(run)
    with pytest.raises(RunError, match=r"rounds = 2, but 3 are done in .*set rounds to that"):
        library.resume(run)
    assert len(list(run.rglob("done.json"))) == 3


def test_more_rounds_are_in_both_files(tmp_path, run):
    library.resume(run, ["rounds=5"])
    assert read_signed(run / "run.json")["config"]["rounds"] == 5
    assert load_run(run).config.rounds == 5
    library.run(CONFIG, ["rounds=5"], out=tmp_path / "whole")
    assert file_hashes(run) == file_hashes(tmp_path / "whole")


@pytest.mark.parametrize("file", ["config.toml", "run.json"])
def test_a_kill_while_they_are_written_can_be_resumed(tmp_path, run, monkeypatch, file):
    def killed(path, content):
        if path.name == file:
            raise Killed
        write_durably(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(begun, "write_durably", killed)
        with pytest.raises(Killed):
            library.resume(run, ["rounds=5"])
    if file == "config.toml":  # nothing was written
        assert load_run(run).config.rounds == 3
    else:
        with pytest.raises(RunError, match=r"rounds was 3 and is 5.*nufed run --resume"):
            load_run(run)
    library.resume(run, ["rounds=5"] if file == "config.toml" else [])
    library.run(CONFIG, ["rounds=5"], out=tmp_path / "whole")
    assert file_hashes(run) == file_hashes(tmp_path / "whole")


def test_a_run_stopped_while_it_is_trained_longer_is_not_finished(run):
    def killed(event):
        raise Killed

    with pytest.raises(Killed):
        library.resume(run, ["rounds=5"], on_progress=killed)
    with pytest.raises(RunError, match=r"is not finished, done.json has 3 rounds: continue with"):
        load_run(run)


def test_other_software_is_one_warning_and_both_versions_are_shown(run, monkeypatch):
    before = read_signed(run / "run.json")
    monkeypatch.setattr(begun, "version", lambda package: f"{package}-9")
    for _ in range(2):
        with pytest.warns(NumericalWarning) as told:
            library.resume(run)
        (warning,) = told
        assert f"torch {before['software']['torch']}, now torch-9" in str(warning.message)
    after = read_signed(run / "run.json")
    assert after.pop("resumed") == [{p: f"{p}-9" for p in ("nufed", "torch", "numpy")}]
    assert after == before  # what it began with stays
    shown = dict(settings_table(load_run(run)).rows)["software"]
    for package in ("nufed", "torch", "numpy"):
        assert f"{package} {before['software'][package]}, then {package}-9" in shown
    monkeypatch.undo()
    monkeypatch.setattr("nufed.report.build_report", lambda *_, **__: None)
    library.resume(run)  # with the first versions again: no warning, and it is written down
    assert len(read_signed(run / "run.json")["resumed"]) == 2


def test_runs_of_the_format_before_are_read_and_compared(run):
    """There run.json lists also what a method does not set."""
    about = read_signed(run / "run.json")
    config = load_run(run).config
    full = json.loads(config.model_dump_json(exclude={"workers"}))
    about |= {"format": begun.FULL_METHODS, "config": full}
    (run / "run.json").write_bytes(signed(about))
    library.resume(run, ["rounds=4"])
    assert load_run(run).config.rounds == 4
    edit(run, "adapt_lr = 0.1", "adapt_lr = 0.9")
    with pytest.raises(RunError, match=r"method.adapt_lr was 0.1 and is 0.9"):
        load_run(run)


@pytest.mark.parametrize("written", [1, 4, "3", None, [3]])
def test_other_formats_are_refused(run, written):
    (run / "run.json").write_bytes(signed(read_signed(run / "run.json") | {"format": written}))
    with pytest.raises(RunError, match=r"run.json has format .* and this nufed reads 3"):
        load_run(run)
