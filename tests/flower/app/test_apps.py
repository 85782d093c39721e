"""The apps write the same run directory as simulation, also after they were killed."""

import html
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict

import nufed
from flower.app.in_memory import MemoryGrid, agents_data
from flower.ops.small_app import files_of
from nufed.errors import InputError, RunError, TrainingError
from nufed.flower import App
from nufed.lab.cli.result_commands import report
from nufed.lab.config.problem import build_samples
from nufed.lab.files import read_sealed
from nufed.lab.runs import load_run
from support import Killed, file_hashes, json_lines

AGENTS, COHORT, BAD = 4, 2, 3
DATA = [(x.astype("float32"), y) for x, y in agents_data(AGENTS)]
TEXT = """
name = "four"
baselines = ["majority"]
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


def app_of(folder, text=TEXT, **own):
    (folder / "federation.toml").write_text(text)
    return App(folder / "federation.toml", lambda site: DATA[site["partition-id"]], **own)


def start(
    app, folder, out, tamper=lambda agent, message, reply: reply, sites=AGENTS, requested=None
):
    """As Flower does on `flwr run`."""
    grid = MemoryGrid(app.site, range(sites), folder / "sites", tamper)
    grid.requested = [] if requested is None else requested
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(out)}))
    return grid


def simulate(folder, *more, text=TEXT):
    """The same configuration with all data in one place."""
    settings = [line for line in text.split("[federation]")[0].splitlines() if line != "agents = 4"]
    (folder / "simulated.toml").write_text("\n".join([*settings]))
    inputs, targets = (np.concatenate(part) for part in zip(*DATA, strict=True))
    owners = np.repeat([f"{i}" for i in range(AGENTS)], [len(y) for _, y in DATA])
    given = ["engine=direct", "data.partition=given", "workers=1", *more]
    return nufed.run(
        folder / "simulated.toml", given, data=(inputs, targets, owners), out=folder / "sim"
    )


def trains(requested):
    return [kind for kind, _ in requested].count("train")


def test_a_federation_leaves_the_files_of_the_simulation_and_its_report(tmp_path):
    simulated = simulate(tmp_path)
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "sim")
    null = "baselines/majority/seed-0/agents.jsonl"
    assert (tmp_path / "run" / null).read_bytes() == (tmp_path / "sim" / null).read_bytes()
    run = load_run(tmp_path / "run")
    assert [row.personal for row in run.rows()] == [row.personal for row in simulated.rows()]
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    for scores in run.methods["gmeta"][0].scores:
        assert f"{100 * scores.score[0]:.1f} %" in page
    bundle = nufed.load_bundle(tmp_path / "run" / "bundles" / "gmeta.nufed")
    assert bundle.about.classes == ["a", "b", "c"]
    log = (tmp_path / "run" / "log.txt").read_text()
    scores = run.methods["gmeta"][0].final
    shared, own = np.mean([(s.global_score, s.score[2]) for s in scores], axis=0)
    line = f"accuracy global {shared:.3f}, personal {own:.3f} after 2 steps"
    assert f"round 3 of 3, 2 of 2 sites, {line}" in log


# two have states, which sites keep apart; [method] does not name an algorithm
SEVERAL = """
[methods.gmeta]
[methods.scaffold]
eval_steps = [0]
[methods.ditto]
weight = 0.5
"""


def tables(run, kind):
    """The files of every method or baseline that must be bit-identical in every run."""
    found = {}
    for path in sorted(run.glob(f"{kind}/*/seed-0/*")):
        if path.name == "metrics.jsonl":
            lines = json_lines(path)
            for line in lines:  # sites do not send it
                line.pop("training_loss", None)
            found[str(path.relative_to(run))] = lines
        elif path.name in ("agents.jsonl", "model.safetensors"):
            found[str(path.relative_to(run))] = path.read_bytes()
    return found


def test_several_methods_are_trained_in_one_run_with_the_simulators_bits(tmp_path):
    text = TEXT.replace('["majority"]', '["majority", "untrained", "local"]')
    simulated = simulate(tmp_path, text=text.replace("[federation]", SEVERAL + "[federation]"))
    start(app_of(tmp_path, text + SEVERAL), tmp_path, tmp_path / "run")
    for kind, names in (
        ("methods", {"gmeta", "scaffold", "ditto"}),
        ("baselines", {"majority", "untrained", "local"}),
    ):
        one, other = (tables(tmp_path / name, kind) for name in ("run", "sim"))
        assert one == other and {path.split("/")[1] for path in one} == names
    run = load_run(tmp_path / "run")
    assert [row.personal for row in run.rows()] == [row.personal for row in simulated.rows()]
    assert {path.stem for path in (tmp_path / "run" / "bundles").iterdir()} >= {"gmeta", "scaffold"}
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert all(f">{method}<" in page for method in ("gmeta", "scaffold", "ditto"))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.index("gmeta, round 3 of 3") < log.index("scaffold, round 1 of 3")
    asked = [e for e in json_lines(tmp_path / "run" / "audit.jsonl") if e["event"] == "asked"]
    assert list(dict.fromkeys(e["method"] for e in asked)) == ["gmeta", "scaffold", "ditto"]
    personal = (tmp_path / "sites").glob("*/methods/*/personal/0.safetensors")
    assert {path.parts[-3] for path in personal} == {"gmeta", "scaffold", "ditto"}


@pytest.mark.usefixtures("no_report")
def test_several_methods_resume_and_train_longer_each_from_its_own_state(tmp_path):
    text = TEXT + SEVERAL
    start(app_of(tmp_path, text.replace("rounds = 3", "rounds = 5")), tmp_path, tmp_path / "right")

    def kill(agent, message, reply):
        if message.metadata.message_type == "train":
            trained.append(agent)
            if len(trained) in (5, 12):
                raise Killed
        return reply

    trained = []
    for _ in range(2):
        with pytest.raises(Killed):
            start(app_of(tmp_path, text), tmp_path, tmp_path / "run", kill)
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run", kill)
    longer = app_of(tmp_path, text.replace("rounds = 3", "rounds = 5"))
    start(longer, tmp_path, tmp_path / "run")
    one, other = (tables(tmp_path / name, "methods") for name in ("run", "right"))
    assert one == other and len(one) == 9


@pytest.mark.usefixtures("no_report")
def test_after_a_method_that_fails_the_others_are_trained(tmp_path):
    def lose(agent, message, reply):
        named = message.content.get("method", {}).get("name") == "scaffold"
        return None if named and message.metadata.message_type == "train" else reply

    app = app_of(tmp_path, TEXT + SEVERAL)
    with pytest.raises(TrainingError, match="round 1 has no usable update"):
        start(app, tmp_path, tmp_path / "run", lose)
    with pytest.raises(TrainingError, match="start the sites"):
        start(app, tmp_path, tmp_path / "none", sites=0)  # none can be trained, so one is tried
    assert len(list((tmp_path / "none").rglob("failure.json"))) == 1
    run = load_run(tmp_path / "run")
    assert list(run.methods) == ["gmeta", "ditto"] and "scaffold" in run.failures[0]
    start(app, tmp_path, tmp_path / "run")
    assert list(load_run(tmp_path / "run").methods) == ["gmeta", "scaffold", "ditto"]


@pytest.mark.usefixtures("no_report")
def test_if_all_sites_leave_between_two_methods_the_run_fails_and_resumes(tmp_path):
    def leave(agent, message, reply):
        if message.metadata.message_type == "evaluate.keep":
            grid.contexts.clear()
        return reply

    app = app_of(tmp_path, TEXT + SEVERAL)
    grid = MemoryGrid(app.site, range(AGENTS), tmp_path / "sites", leave)
    with pytest.raises(TrainingError, match="start the sites"):
        app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "run")}))
    start(app, tmp_path, tmp_path / "run")
    assert list(load_run(tmp_path / "run").methods) == ["gmeta", "scaffold", "ditto"]


def test_a_site_refuses_a_method_that_its_app_does_not_have(tmp_path):
    with pytest.raises(InputError, match="for method 'fedavg', but this app has gmeta, scaffold"):
        app_of(tmp_path, TEXT + SEVERAL).plan("fedavg")


FOUR = TEXT.replace("0.75", "1.0").replace("unseen_agents = 1", "")


def nonsense(agent, message, reply):
    """One site sends 10,000 times its model: finite, of the right shape, on the grid."""
    if agent != BAD or message.metadata.message_type != "train":
        return reply
    model = Array(reply.content["arrays"]["model"].numpy() * np.float32(1e4))
    arrays = ArrayRecord({"model": model})
    return Message(RecordDict({**reply.content, "arrays": arrays}), reply_to=message)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("setting", ["", 'max_update_norm = "off"'])
def test_by_default_the_finite_nonsense_of_one_site_is_named_and_left_out(setting, tmp_path):
    app = app_of(tmp_path, FOUR.replace("eval_every", f"{setting}\neval_every"))
    start(app, tmp_path, tmp_path / "run", nonsense)
    (part,) = (tmp_path / "run").glob("methods/*/seed-*")
    rejected = [
        [r["agent"] for r in line["rejected"]] for line in json_lines(part / "metrics.jsonl")
    ]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert rejected == ([[]] * 4 if setting else [[], [BAD], [BAD], [BAD]])
    assert ("above 100 times the median" in log) == (not setting)


def test_a_norm_bound_is_on_by_default_in_federations_only(tmp_path):
    def bound(setting, more=""):
        text = FOUR.replace("eval_every", f"{setting}\neval_every") + more
        return app_of(tmp_path, text).plan().rules.max_update_norm

    assert bound("") == 100
    assert nufed.lab.config.load_config(tmp_path / "federation.toml").norm_bound() is None
    assert bound("max_update_norm = 3.0") == 3
    assert bound('max_update_norm = "off"') is None
    assert bound("", "[privacy]\nclip = 1.0") is None
    with pytest.raises(InputError, match="max_update_norm"):
        bound('max_update_norm = "on"')


@pytest.mark.usefixtures("no_report")
def test_a_norm_bound_has_the_same_effect_as_in_simulation(tmp_path):
    given = ["participation=1.0", "data.unseen_agents=0", "max_update_norm=1.05"]
    simulate(tmp_path, *given)
    app = app_of(tmp_path, FOUR.replace("eval_every", "max_update_norm = 1.05\neval_every"))
    start(app, tmp_path, tmp_path / "run")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "sim")
    assert any(line["rejected"] for line in files_of(tmp_path / "run")["metrics"])


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("algorithm", ["ditto", "fedper"])
def test_the_log_names_the_global_and_the_personal_model(algorithm, tmp_path):
    """Ditto's global model is not its personal one after 0 steps; FedPer's server has none."""
    text = TEXT.replace("[method]", f'[method]\nalgorithm = "{algorithm}"')
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run")
    scores = load_run(tmp_path / "run").methods[algorithm][0].final
    shared, own = [s.global_score for s in scores], np.mean([s.score[0] for s in scores])
    line = f"personal {own:.3f} after 0 steps"
    if algorithm == "ditto":
        line = f"global {np.mean(shared):.3f}, {line}"
    assert f"round 3 of 3, 2 of 2 sites, accuracy {line}" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.usefixtures("no_report")
def test_sites_keep_the_personal_models_of_the_simulation(tmp_path):
    """As results show them: with the step size that was chosen on validation samples."""
    text = TEXT.replace("[data]", "[data]\nvalidation = 0.25")
    text = text.replace("[method]", '[method]\nalgorithm = "scaffold"')
    simulate(tmp_path, "data.validation=0.25", "method.algorithm=scaffold")
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run")
    right = {path.name: read_sealed(path) for path in (tmp_path / "sim").rglob("personal/*")}
    kept = {path.name: read_sealed(path) for path in (tmp_path / "sites").rglob("personal/*")}
    assert len(kept) == AGENTS > len(right) > 0  # newcomers have no state
    for name, found in right.items():
        assert torch.equal(kept[name].tensors["model"], found.tensors["model"])
        assert kept[name].about["lr_scale"] == found.about["lr_scale"] != 1


@pytest.mark.parametrize("algorithm", ["scaffold", "ditto"])
def test_the_report_says_what_a_lost_state_means(algorithm, tmp_path):
    forgotten = []

    def forget(agent, message, reply):
        state = next((tmp_path / "sites").glob(f"*/agent-{agent}"), None)
        if state and not forgotten:
            forgotten.append(agent)
            state.unlink()
        return reply

    text = TEXT.replace("[method]", f'[method]\nalgorithm = "{algorithm}"')
    text = text.replace("participation = 0.75", "participation = 1.0")
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run", forget)
    (found,) = [w for w in load_run(tmp_path / "run").warnings() if w.about == "numbers"]
    assert found.first_round == 2 and found.count == 1
    assert f"site {forgotten[0]} lost its state and restarted" in found.message
    means = "is no longer the mean of the agents'" if algorithm == "scaffold" else "is lost"
    assert means in found.message
    assert found.message in html.unescape((tmp_path / "run" / "report.html").read_text())


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_message_it_resumes_to_the_same_bits(tmp_path, step):
    app = app_of(tmp_path)
    whole = start(app, tmp_path, tmp_path / "whole")
    messages = len(whole.requested)
    right = files_of(tmp_path / "whole")
    for number in range(1, messages + 1, step):
        left = [number]

        def kill(agent, message, reply, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return reply

        out = tmp_path / f"killed-{number}"
        with pytest.raises(Killed):
            start(app, tmp_path, out, kill, requested=(killed := []))
        grid = start(app, tmp_path, out)
        assert files_of(out) == right
        assert (
            trains(killed) + trains(grid.requested) <= trains(whole.requested) + COHORT
        )  # one round is redone


def test_a_run_resumes_only_with_the_same_configuration(tmp_path):
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    with pytest.raises(RunError, match=r"method.meta_lr was 0.3 and is 0.2"):
        start(app_of(tmp_path, TEXT.replace("0.3", "0.2")), tmp_path, tmp_path / "run")
    assert load_run(tmp_path / "run").methods  # unchanged


@pytest.mark.usefixtures("no_report")
@pytest.mark.timeout(120)  # opening a FIFO without a reader would block for ever
@pytest.mark.parametrize("place", ["log.txt", "lock", "privacy.json", "federation.json"])
def test_a_special_file_in_its_directory_is_not_opened(tmp_path, place):
    app, path = app_of(tmp_path), tmp_path / "run" / place
    start(app, tmp_path, tmp_path / "run")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(RunError, match=f"{place} is a special file"):
        start(app, tmp_path, tmp_path / "run")


def test_a_run_can_be_resumed_for_more_rounds(tmp_path):
    start(app_of(tmp_path), tmp_path, tmp_path / "longer")
    longer = app_of(tmp_path, TEXT.replace("rounds = 3", "rounds = 4"))
    start(longer, tmp_path, tmp_path / "longer")
    start(longer, tmp_path, tmp_path / "at once")
    assert files_of(tmp_path / "longer") == files_of(tmp_path / "at once")


@pytest.mark.usefixtures("no_report")
def test_a_run_is_not_reset_to_fewer_rounds_than_are_done(tmp_path):
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    before = file_hashes(tmp_path / "run" / "methods")
    shorter = app_of(tmp_path, TEXT.replace("rounds = 3", "rounds = 2"))
    with pytest.raises(RunError, match="rounds = 2, but 3 are done"):
        start(shorter, tmp_path, tmp_path / "run")
    assert file_hashes(tmp_path / "run" / "methods") == before
    assert load_run(tmp_path / "run").config.rounds == 3


@pytest.mark.usefixtures("no_report")
def test_models_are_saved_at_the_same_rounds_as_in_simulation(tmp_path):
    simulate(tmp_path, "save_every=2")
    start(app_of(tmp_path, "save_every = 2" + TEXT), tmp_path, tmp_path / "run")
    (right,) = (tmp_path / "sim").glob("methods/*/*/model-round-*")
    (saved,) = (tmp_path / "run").glob("methods/*/*/model-round-*")
    assert saved.name == right.name and saved.read_bytes() == right.read_bytes()


@pytest.mark.usefixtures("no_report")
def test_a_run_whose_sites_sent_no_scores_requests_them_when_resumed(tmp_path):

    def silent(agent, message, reply):
        last = message.content.get("about", {}).get("round") == 3
        return None if last and message.metadata.message_type == "evaluate" else reply

    with pytest.raises(TrainingError, match="no site sent usable scores"):
        start(app_of(tmp_path), tmp_path, tmp_path / "run", silent)
    grid = start(app_of(tmp_path), tmp_path, tmp_path / "run")
    assert not trains(grid.requested)
    start(app_of(tmp_path), tmp_path, tmp_path / "whole")
    one, other = (load_run(tmp_path / name) for name in ("run", "whole"))
    assert one.unscored() == []
    assert [row.personal for row in one.rows()] == [row.personal for row in other.rows()]
    assert files_of(one.path)["model.safetensors"] == files_of(other.path)["model.safetensors"]


def test_a_failed_run_says_why_and_can_be_resumed(tmp_path):
    app = app_of(tmp_path, TEXT + "\n")
    with pytest.raises(TrainingError, match="start the sites"):
        start(app, tmp_path, tmp_path / "run", sites=0)
    failure = tmp_path / "run" / "methods" / "gmeta" / "seed-0" / "failure.json"
    assert "start the sites" in failure.read_text()
    assert "start the sites" in (tmp_path / "run" / "log.txt").read_text()
    start(app, tmp_path, tmp_path / "run")
    assert not failure.exists() and (tmp_path / "run" / "report.html").exists()


def test_a_site_whose_data_does_not_match_is_excluded(tmp_path):
    (tmp_path / "federation.toml").write_text(TEXT)
    odd = {0: (DATA[0][0][:, :4], DATA[0][1]), 1: (DATA[1][0], DATA[1][1] + 1)}
    app = App(
        tmp_path / "federation.toml",
        lambda site: odd.get(site["partition-id"], DATA[site["partition-id"]]),
    )
    start(app, tmp_path, tmp_path / "run")
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "site 0: it failed: this site's inputs have shape (4,)" in page
    assert "site 1: it failed: this site's targets need 4 outputs" in page


@pytest.mark.usefixtures("no_report")
def test_a_sites_error_message_is_printed_literally(tmp_path, capsys):
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
        ("seeds = [0, 1]" + TEXT, "seeds has 2 entries: a federation trains one seed per run"),
        (
            TEXT + "[approval]\nrounds = [5, 9]\n",
            "rounds = 3: must be in 5 … 9, as approval.rounds says",
        ),
        (TEXT + "[approval]\nmeta_lr = [0, 0.1]\n", "method.meta_lr = 0.3: must be in 0 … 0.1"),
        (TEXT + "[approval]\nseeds = [0, 9]\n", "must be [least, most] of rounds or of a setting"),
        (
            TEXT.replace("classes", "secure_aggregation = true\nclasses")
            + "[privacy]\nclip = 1.0\n[methods.fedavg]\n[methods.gmeta]\n",
            "several methods need 1.0",
        ),
        (TEXT + "[approval]\nrounds = [9, 1]\n", "must be [least, most] of rounds or of a setting"),
        ("eval_agents = 2" + TEXT, "eval_agents is for simulation"),
        ('eval_on = "validation"' + TEXT, "sites have no validation part; set data.validation"),
        (TEXT + "[faults]\ndropout = 0.1\n", "[faults] is for simulation"),
        (TEXT.replace("wait = 0.01", "wait = -1"), "federation.wait"),
        (TEXT.replace("wait = 0.01", "wiat = 1"), "did you mean"),
    ],
    ids=str,
)
def test_a_configuration_unsuitable_for_a_federation_is_refused(text, sentence, tmp_path):
    with pytest.raises(InputError, match=re.escape(sentence)):
        app_of(tmp_path, text).plan()
    assert [path.name for path in Path(tmp_path).iterdir()] == ["federation.toml"]


def test_commands_that_need_a_federations_data_say_that_it_is_at_the_sites(tmp_path):
    start(app_of(tmp_path), tmp_path, tmp_path / "run")
    with pytest.raises(InputError, match="start it with `nufed federate run`"):
        nufed.run(tmp_path / "federation.toml", out=tmp_path / "simulated")
    with pytest.raises(RunError, match="resume it with `nufed federate run`"):
        nufed.resume(tmp_path / "run")
    with pytest.raises(InputError, match="at the sites of its federation"):
        build_samples(load_run(tmp_path / "run").config.data)
    assert not (tmp_path / "simulated").exists()


BASELINES = ["majority", "untrained", "local"]


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("validation", ["0.0", "0.25"])
def test_sites_compute_the_null_baselines_of_the_simulation(tmp_path, validation):
    """With validation samples also the step size of fine-tuning and of local training is chosen."""
    named = f"baselines = {BASELINES}\ntune_local = {'true' if validation != '0.0' else 'false'}"
    text = TEXT.replace('baselines = ["majority"]', named)
    text = text.replace("[data]", f"[data]\nvalidation = {validation}")
    more = [f"data.validation={validation}", f"baselines={BASELINES}".replace("'", '"')]
    simulate(tmp_path, *more, *(["tune_local=true"] if validation != "0.0" else []))
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run")
    right = sorted((tmp_path / "sim" / "baselines").rglob("*.json*"))
    right = [path for path in right if path.name not in ("done.json",)]
    names = {str(path.relative_to(tmp_path / "sim" / "baselines")) for path in right}
    assert {f"{name}/seed-0/agents.jsonl" for name in BASELINES} <= names
    assert ("local/seed-0/step-sizes.json" in names) == (validation != "0.0")
    for path in right:
        ours = tmp_path / "run" / path.relative_to(tmp_path / "sim")
        assert ours.read_bytes() == path.read_bytes(), path.name
    simulated, run = (load_run(tmp_path / name) for name in ("sim", "run"))
    one, other = (
        [str(replace(row, over_samples=None).record()) for row in each.rows()]  # sites send none
        for each in (run, simulated)
    )
    assert one == other  # as text: some are NaN


@pytest.mark.usefixtures("no_report")
def test_a_baseline_that_a_site_lacks_is_left_out(tmp_path):
    def silent(agent, message, reply):
        asked = message.content.get("about", {}).get("baseline")
        return None if agent == 2 and asked == "local" else reply

    text = TEXT.replace('["majority"]', str(BASELINES))
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run", silent)
    assert load_run(tmp_path / "run").baselines.keys() == {"majority", "untrained"}
    assert "the baseline local is left out" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.usefixtures("no_report")
def test_only_the_baselines_that_the_configuration_names_are_requested(tmp_path):
    grid = start(app_of(tmp_path, TEXT.replace('["majority"]', "[]")), tmp_path, tmp_path / "run")
    assert not load_run(tmp_path / "run").baselines
    assert "evaluate.baseline" not in {kind for kind, _ in grid.requested}


def test_unseen_sites_are_named_by_their_numbers(tmp_path):
    named = TEXT.replace("unseen_agents = 1", 'unseen = ["2"]')
    assert list(app_of(tmp_path, named).plan().seen) == [0, 1, 3]
    with pytest.raises(InputError, match=r"data.unseen = \['ann'\]: .* the agents are 0, 1, 2, 3"):
        app_of(tmp_path, TEXT.replace("unseen_agents = 1", 'unseen = ["ann"]')).plan()
