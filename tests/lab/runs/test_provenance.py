"""config.toml and the sealed run.json must agree; a difference is named before anything is done."""

import json
import shutil

import pytest

import nufed as library
from lab.experiment.test_resume import Killed
from nufed.errors import NumericalWarning, RunError
from nufed.lab.files import read_sealed, sha256, write_durably, write_sealed
from nufed.lab.report.tables import settings_table
from nufed.lab.runs import load_run, provenance
from support import file_hashes, without_report

pytestmark = pytest.mark.usefixtures("no_report")
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
    "methods": {
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
        "exact": {"algorithm": "gmeta"},
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with without_report():
        return library.run(CONFIG, out=tmp_path_factory.mktemp("finished") / "run").path


@pytest.fixture
def run(tmp_path, finished):
    return shutil.copytree(finished, tmp_path / "run")


def edit(run, before, after):
    config = run / "config.toml"
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after, 1))


FO = '[methods.fo]\nalgorithm = "gmeta"\ncurvature = "first_order"\n\n'
EXACT = '[methods.exact]\nalgorithm = "gmeta"\n\n'
CHANGES = [
    ("rounds = 3", "rounds = 5000", "rounds was 3 and is 5000"),
    ("rounds = 3", "rounds = 2", "rounds was 3 and is 2"),
    ("adapt_lr = 0.1", "adapt_lr = 0.9", "method.adapt_lr was 0.1 and is 0.9"),
    # a setting that a method lacks is that of [method], even if it is the default
    ("[methods.exact]", "[methods.exact]\nadapt_lr = 0.01", "methods.exact.adapt_lr was None"),
    (
        FO + EXACT,
        EXACT + FO,
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
def test_nothing_is_written_when_a_changed_run_is_resumed(run, before, after, words):
    """Fewer rounds used to remove every done.json, after which --resume was needed."""
    edit(run, before, after)
    files = file_hashes(run)
    with pytest.raises(RunError, match=words):
        library.resume(run)
    assert file_hashes(run) == files
    edit(run, after, before)
    library.resume(run)
    assert load_run(run).rows()


def test_a_part_with_more_rounds_than_the_run_is_left_unchanged(run):
    """Also if run.json was changed to fewer rounds and sealed again."""
    edit(run, "rounds = 3", "rounds = 2")
    about = read_sealed(run / "run.json").about
    about["config"]["rounds"] = 2
    write_sealed(run / "run.json", about)
    with pytest.raises(RunError, match=r"done.json is invalid: rounds = 3, must be at most"):
        load_run(run)
    with pytest.raises(RunError, match=r"rounds = 2, but 3 are done in .*set rounds to that"):
        library.resume(run)
    assert len(list(run.rglob("done.json"))) == 3


def test_more_rounds_are_in_both_files(tmp_path, run):
    library.resume(run, ["rounds=5"])
    assert read_sealed(run / "run.json").about["config"]["rounds"] == 5
    assert load_run(run).config.rounds == 5
    library.run(CONFIG, ["rounds=5"], out=tmp_path / "whole")
    assert file_hashes(run) == file_hashes(tmp_path / "whole")


@pytest.mark.parametrize("file", ["config.toml", "run.json"])
def test_a_kill_while_they_are_written_can_be_resumed(tmp_path, run, monkeypatch, file):
    def killed_in(write):
        def killed(path, content):
            if path.name == file:
                raise Killed
            write(path, content)

        return killed

    with monkeypatch.context() as patch:
        patch.setattr(provenance, "write_durably", killed_in(write_durably))
        patch.setattr(provenance, "write_sealed", killed_in(write_sealed))
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
    with pytest.raises(RunError, match=r"is not finished, done.json has 3 rounds: resume it with"):
        load_run(run)


def test_other_software_is_one_warning_and_both_versions_are_shown(run, monkeypatch):
    before = read_sealed(run / "run.json").about
    monkeypatch.setattr(provenance, "version", lambda package: f"{package}-9")
    for _ in range(2):
        with pytest.warns(NumericalWarning) as told:
            library.resume(run)
        (warning,) = told
        assert f"torch {before['software']['torch']}, now torch-9" in str(warning.message)
    after = read_sealed(run / "run.json").about
    assert after.pop("resumed") == [{p: f"{p}-9" for p in ("nufed", "torch", "numpy")}]
    assert after == before  # the original software is kept
    shown = dict(settings_table(load_run(run)).rows)["software"]
    for package in ("nufed", "torch", "numpy"):
        assert f"{package} {before['software'][package]}, then {package}-9" in shown
    monkeypatch.undo()
    library.resume(run)  # with the first versions again: no warning, and recorded
    assert len(read_sealed(run / "run.json").about["resumed"]) == 2


@pytest.mark.parametrize("written", [1, 3, 5, "4", None, [4]])
def test_other_formats_are_refused(run, written):
    write_sealed(run / "run.json", read_sealed(run / "run.json").about | {"format": written})
    with pytest.raises(RunError, match=r"run.json has format .* and this nufed reads 4"):
        load_run(run)


def signed(content):
    """What formats 2 and 3 wrote in place of a sealed file."""
    digest = sha256(json.dumps(content, sort_keys=True).encode())
    return json.dumps({"content": content, "sha256": digest}, indent=1)


@pytest.mark.parametrize(
    ("written", "layout"), [(1, json.dumps), (2, signed), (3, signed)], ids=["1", "2", "3"]
)
def test_run_directories_of_earlier_formats_are_refused_by_their_format(run, written, layout):
    about = read_sealed(run / "run.json").about | {"format": written}
    (run / "run.json").write_text(layout(about))
    edit(run, "rounds = 3", "rounds = 3\na_key_of_then = 1")
    sentence = rf"run.json has format {written}, and this nufed reads 4: use the version that wrote"
    for read in (load_run, library.resume):
        with pytest.raises(RunError, match=sentence):
            read(run)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 10**5, '{"content": 3}', '{"about": {}}'])
def test_what_is_no_run_json_is_called_damaged(run, text):
    (run / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run.json is damaged, or another version of nufed wrote"):
        load_run(run)
