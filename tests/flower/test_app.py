"""The apps leave the run directory that simulation leaves, also after they were killed."""

import html
import os
import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict

import nufed
from federate.small_app import files_of
from flower.in_memory import MemoryGrid, agents_data
from nufed.cli import report
from nufed.errors import InputError, RunError, TrainingError
from nufed.flower import App
from nufed.runs import load_run
from nufed.runs.build import build_samples
from support import file_hashes

AGENTS, COHORT, BAD = 4, 2, 3
DATA = [(x.astype("float32"), y) for x, y in agents_data(AGENTS)]
TEXT = """
name = "four"
rounds = 3
participation = 0.75
eval_every = 2
eval_steps = 2
[data]
agents = 4
test = 0.25
unseen_agents = 1
[model]
name = "fcnn"
args = {hidden = [6]}
[method]
adapt_lr = 0.2
meta_lr = 0.3
batch_size = 6
local_steps = 2
[federation]
input_shape = [5]
classes = ["a", "b", "c"]
wait = 0.01
deadline = 0.01
"""


class Killed(BaseException):
    pass


def app_of(folder, text=TEXT, **own):
    (folder / "federation.toml").write_text(text)
    return App(folder / "federation.toml", lambda site: DATA[site["partition-id"]], **own)


def start(app, folder, out, tamper=lambda agent, message, reply: reply, sites=AGENTS, asked=None):
    """As Flower does when `flwr run` was called."""
    grid = MemoryGrid(app.site, range(sites), folder / "sites", tamper)
    grid.asked = [] if asked is None else asked
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(out)}))
    return grid


def simulate(folder, *more):
    """The same configuration where all data lies in one place."""
    settings = [line for line in TEXT.split("[federation]")[0].splitlines() if line != "agents = 4"]
    (folder / "simulated.toml").write_text("\n".join([*settings]))
    inputs, targets = (np.concatenate(part) for part in zip(*DATA, strict=True))
    owners = np.repeat([f"{i}" for i in range(AGENTS)], [len(y) for _, y in DATA])
    given = ["engine=direct", "data.partition=given", 'baselines=["majority"]', "workers=1", *more]
    return nufed.run(
        folder / "simulated.toml", given, data=(inputs, targets, owners), out=folder / "sim"
    )


def trains(asked):
    return [kind for kind, _ in asked].count("train")


def test_a_federation_leaves_the_files_of_the_simulation_and_its_report(tmp_path):
    simulated = simulate(tmp_path)
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "sim")
    null = "baselines/majority/seed-0/agents.jsonl"
    assert (tmp_path / "run" / null).read_bytes() == (tmp_path / "sim" / null).read_bytes()
    run = load_run(tmp_path / "run")
    assert [row.after for row in run.rows()] == [row.after for row in simulated.rows()]
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    for scores in run.methods["gmeta"][0].scores:
        assert f"{100 * scores.score[0]:.1f} %" in page
    bundle = nufed.load_bundle(tmp_path / "run" / "bundles" / "gmeta.nufed")
    assert bundle.about.classes == ["a", "b", "c"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "round 3 of 3, 2 of 2 sites" in log


def test_killed_at_any_message_it_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out, **_: out)  # it takes a while
    app = app_of(tmp_path)
    whole = start(app, tmp_path, tmp_path / "whole")
    messages = len(whole.asked)
    right = files_of(tmp_path / "whole")
    for number in range(1, messages + 1):
        left = [number]

        def kill(agent, message, reply, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return reply

        out = tmp_path / f"killed-{number}"
        with pytest.raises(Killed):
            start(app, tmp_path, out, kill, asked=(killed := []))
        grid = start(app, tmp_path, out)
        assert files_of(out) == right
        assert (
            trains(killed) + trains(grid.asked) <= trains(whole.asked) + COHORT
        )  # one round is redone


def test_a_run_goes_on_only_as_it_began(tmp_path):
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    with pytest.raises(RunError, match=r"method.meta_lr was 0.3 and is 0.2"):
        start(app_of(tmp_path, TEXT.replace("0.3", "0.2")), tmp_path, tmp_path / "run")
    assert load_run(tmp_path / "run").methods  # and what is there stays


@pytest.mark.timeout(120)  # opening a FIFO that nobody reads from would wait without end
@pytest.mark.parametrize("place", ["log.txt", "lock", "privacy.json", "federation.json"])
def test_a_special_file_in_its_directory_is_not_opened(tmp_path, monkeypatch, place):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out, **_: out)
    app, path = app_of(tmp_path), tmp_path / "run" / place
    start(app, tmp_path, tmp_path / "run")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(RunError, match=f"{place} is a special file"):
        start(app, tmp_path, tmp_path / "run")


def test_a_run_can_go_on_for_more_rounds(tmp_path):
    start(app_of(tmp_path), tmp_path, tmp_path / "longer")
    longer = app_of(tmp_path, TEXT.replace("rounds = 3", "rounds = 4"))
    start(longer, tmp_path, tmp_path / "longer")
    start(longer, tmp_path, tmp_path / "at once")
    assert files_of(tmp_path / "longer") == files_of(tmp_path / "at once")


def test_a_run_is_not_taken_back_to_fewer_rounds_than_are_done(tmp_path, monkeypatch):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out, **_: out)
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    before = file_hashes(tmp_path / "run" / "methods")
    shorter = app_of(tmp_path, TEXT.replace("rounds = 3", "rounds = 2"))
    with pytest.raises(RunError, match="rounds = 2, but 3 are done"):
        start(shorter, tmp_path, tmp_path / "run")
    assert file_hashes(tmp_path / "run" / "methods") == before
    assert load_run(tmp_path / "run").config.rounds == 3


def test_models_are_saved_every_so_many_rounds_as_in_simulation(tmp_path, monkeypatch):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out, **_: out)
    simulate(tmp_path, "save_every=2")
    start(app_of(tmp_path, "save_every = 2" + TEXT), tmp_path, tmp_path / "run")
    (right,) = (tmp_path / "sim").glob("methods/*/*/model-round-*")
    (saved,) = (tmp_path / "run").glob("methods/*/*/model-round-*")
    assert saved.name == right.name and saved.read_bytes() == right.read_bytes()


def test_a_run_whose_sites_sent_no_scores_can_ask_for_them_again(tmp_path, monkeypatch):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out, **_: out)

    def silent(agent, message, reply):
        last = message.content.get("about", {}).get("round") == 3
        return None if last and message.metadata.message_type == "evaluate" else reply

    with pytest.raises(TrainingError, match="no site sent scores that can be used"):
        start(app_of(tmp_path), tmp_path, tmp_path / "run", silent)
    grid = start(app_of(tmp_path), tmp_path, tmp_path / "run")
    assert not trains(grid.asked)
    start(app_of(tmp_path), tmp_path, tmp_path / "whole")
    one, other = (load_run(tmp_path / name) for name in ("run", "whole"))
    assert one.unscored() == []
    assert [row.after for row in one.rows()] == [row.after for row in other.rows()]
    assert files_of(one.path)["model.safetensors"] == files_of(other.path)["model.safetensors"]


def test_a_failed_run_says_why_and_can_be_gone_on_with(tmp_path):
    app = app_of(tmp_path, TEXT + "\n")
    with pytest.raises(TrainingError, match="start the sites"):
        start(app, tmp_path, tmp_path / "run", sites=0)
    failure = tmp_path / "run" / "methods" / "gmeta" / "seed-0" / "failure.json"
    assert "start the sites" in failure.read_text()
    assert "start the sites" in (tmp_path / "run" / "log.txt").read_text()
    start(app, tmp_path, tmp_path / "run")
    assert not failure.exists() and (tmp_path / "run" / "report.html").exists()


def test_a_site_whose_data_is_unlike_the_others_takes_no_part(tmp_path):
    (tmp_path / "federation.toml").write_text(TEXT)
    odd = {0: (DATA[0][0][:, :4], DATA[0][1]), 1: (DATA[1][0], DATA[1][1] + 1)}
    app = App(
        tmp_path / "federation.toml",
        lambda site: odd.get(site["partition-id"], DATA[site["partition-id"]]),
    )
    start(app, tmp_path, tmp_path / "run")
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "agent 0: it failed: this site's inputs have shape (4,)" in page
    assert "agent 1: it failed: this site's targets need 4 outputs" in page


def test_the_words_of_a_site_are_printed_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out, **_: out)
    monkeypatch.setattr("nufed.cli.build_report", lambda runs, out, **_: out)

    def fail(agent, message, reply):
        if message.metadata.message_type != "train" or agent != BAD:
            return reply
        return Message(Error(2, "<class 'app.Mine'>:<'[/red] [bold]words'>"), reply_to=message)

    start(app_of(tmp_path), tmp_path, tmp_path / "run", fail)
    report([tmp_path / "run"])
    assert "it failed: [/red] [bold]words" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TEXT.replace("input_shape = [5]", ""), "must be the shape of one sample's input"),
        ("seeds = [0, 1]" + TEXT, "seeds are 2: a federation trains with one seed at a time"),
        (TEXT + "[methods.a]\n[methods.b]\n", "methods are 2: a federation trains with one"),
        ("eval_agents = 2" + TEXT, "eval_agents is for simulation"),
        ('eval_on = "validation"' + TEXT, "sites have no validation part; set data.validation"),
        (TEXT + "[faults]\ndropout = 0.1\n", "faults are for simulation"),
        (TEXT.replace("wait = 0.01", "wait = -1"), "federation.wait"),
        (TEXT.replace("wait = 0.01", "wiat = 1"), "did you mean"),
    ],
    ids=str,
)
def test_a_configuration_that_is_none_of_a_federation_is_refused(text, sentence, tmp_path):
    with pytest.raises(InputError, match=re.escape(sentence)):
        app_of(tmp_path, text).plan()
    assert [path.name for path in Path(tmp_path).iterdir()] == ["federation.toml"]


def test_what_needs_the_data_of_a_federation_says_that_it_is_elsewhere(tmp_path):
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    with pytest.raises(InputError, match="start it with `nufed federate run`"):
        nufed.run(tmp_path / "federation.toml", out=tmp_path / "simulated")
    with pytest.raises(RunError, match="resume it with `nufed federate run`"):
        nufed.resume(tmp_path / "run")
    with pytest.raises(InputError, match="at the sites of its federation"):
        build_samples(load_run(tmp_path / "run").config.data)
    assert not (tmp_path / "simulated").exists()
