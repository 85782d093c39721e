"""What a private run writes, refuses and charges, also after it was killed."""

import html
import json
import re
from collections import Counter

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

import nufed
from flower.app.test_apps import AGENTS, TEXT, app_of, start
from flower.app.test_private import in_round, kept, lost, recording, releases, untouched
from nufed import InputError
from nufed.errors import RunError, TrainingError
from nufed.flower.app.epsilon import server_epsilon
from nufed.flower.app.privacy import Privacy, planned
from nufed.lab.files import read_sealed, sha256
from nufed.lab.report.tables import problem_text
from nufed.lab.runs import load_run
from nufed.lab.runs.part_files import saved_rounds
from nufed.server import choose_cohort
from support import Killed, json_lines

PRIVATE = TEXT + "[privacy]\nclip = 0.5\nnoise = 3.0\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (PRIVATE + "epsilon = 0.1\n", "epsilon = 0.1: 3 rounds with 2 of 3 agents"),
        (PRIVATE + "epsilon_server = 0.1\n", "epsilon_server = 0.1: 3 rounds"),
        (PRIVATE + "delta = 0.5\n", "delta = 0.5: must be below 1/agents"),
        (PRIVATE.replace("clip = 0.5\n", ""), "privacy.clip is not set, so there would be no"),
        ("max_update_norm = 3.0" + PRIVATE, "does not hold with max_update_norm"),
        (PRIVATE.replace("adapt_lr", 'averaging = "samples"\nadapt_lr'), "the uniform mean"),
    ],
)
def test_an_infeasible_private_plan_is_refused_before_anything_happens(text, sentence, tmp_path):
    requested = []
    with pytest.raises(InputError, match=re.escape(sentence)):
        start(app_of(tmp_path, text), tmp_path, tmp_path / "run", requested=requested)
    assert not requested and [path.name for path in tmp_path.iterdir()] == ["federation.toml"]


def test_a_simulation_does_not_pretend_to_be_private(tmp_path):
    (tmp_path / "simulated.toml").write_text(PRIVATE)
    with pytest.raises(InputError, match="is for a federation whose sites keep their data"):
        nufed.run(tmp_path / "simulated.toml", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sites_keep_personal_models_of_a_private_run_without_scores(tmp_path):
    start(app_of(tmp_path, PRIVATE), tmp_path, tmp_path / "run")
    assert len(list((tmp_path / "sites").rglob("personal/*.safetensors"))) == AGENTS
    assert not load_run(tmp_path / "run").methods["gmeta"][0].scores


def notes_of(run):
    *_, newest = sorted((run / "methods" / "gmeta" / "seed-0").glob("checkpoint-*"))
    return read_sealed(newest).about["notes"]


def lines_of(run):
    """The metrics of its rounds, without round 0."""
    return json_lines(run / "methods" / "gmeta" / "seed-0" / "metrics.jsonl")[1:]


def test_a_private_run_reports_what_it_spent_and_no_scores(tmp_path):
    run, requested = tmp_path / "run", []
    start(app_of(tmp_path, PRIVATE), tmp_path, run, in_round(0, 2, lost), requested=requested)
    assert {kind for kind, _ in requested} == {"query", "train", "evaluate.keep"}
    about, lines = read_sealed(run / "privacy.json").about, lines_of(run)
    assert [about[key] for key in ("agents", "cohort", "rounds", "clip")] == [3, 2, 3, 0.5]
    assert about["epsilon"] == lines[-1]["epsilon"]
    spent = [line["epsilon"]["released"] for line in lines]
    assert 0 < spent[0] < spent[1] < spent[2]
    assert not any("evaluation" in line for line in lines)
    log, page = ((run / name).read_text() for name in ("log.txt", "report.html"))
    page = html.unescape(page[page.rindex("<h1>") :])
    told = f"{about['epsilon']['released']:.4g}"
    assert f"epsilon {told} of the released model" in log
    assert f"<td>{told}: for anyone who sees the models" in page and "Sites sent no scores" in page
    assert "<td>samples per agent</td><td>not sent by the sites</td>" in page
    assert problem_text(load_run(run)) == "Data: 4 agents, 1 of them unseen in training (2)."
    assert json.loads((run / "results.json").read_text())["rows"] == []
    trained = nufed.load_bundle(run / "bundles" / "gmeta.nufed").about.trained
    assert told in trained["privacy"]
    for number in range(AGENTS):
        assert f"agent {number}" not in page


def test_claimed_numbers_of_updates_are_shown_apart(tmp_path):
    def claim(agent, message, reply):
        if message.metadata.message_type == "train":
            lie = ConfigRecord({**reply.content["release"], "count": 10**6})
            reply = Message(RecordDict({**reply.content, "release": lie}), reply_to=message)
        return reply

    run = tmp_path / "run"
    start(app_of(tmp_path, PRIVATE), tmp_path, run, claim)
    about = read_sealed(run / "privacy.json").about
    most = about["updates"]["charged"]
    assert about["updates"]["claimed"] == 10**6 and most <= 3
    assert about["epsilon"]["server"] == server_epsilon(about["noise"], most, about["delta"])
    page = html.unescape((run / "report.html").read_text())
    assert f"at most {most}; one site claims 1000000, more than it was sent requests" in page


def test_cohorts_are_drawn_from_a_secret_seed(tmp_path, no_report):
    seeds = set()
    for name in ("one", "other"):
        start(app_of(tmp_path, PRIVATE), tmp_path, tmp_path / name)
        seed = read_sealed(tmp_path / name / "federation.json").about["cohort_seed"]
        seen = app_of(tmp_path, PRIVATE).plan().seen
        right = [choose_cohort(seen, 0.75, seed, k) for k in (1, 2, 3)]
        assert [line["cohort"] for line in lines_of(tmp_path / name)] == right
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
        seeds.add(seed)
    assert len(seeds) == 2 and 0 not in seeds


def test_the_report_of_a_private_run_does_not_name_cohorts(tmp_path, no_report):
    every = PRIVATE.replace("participation = 0.75", "participation = 1.0")
    seen = app_of(tmp_path, every).plan().seen
    start(app_of(tmp_path, every), tmp_path, tmp_path / "run", in_round(seen[0], 2, lost))
    assert lines_of(tmp_path / "run")[1]["rejected"][0]["agent"] == seen[0]
    assert load_run(tmp_path / "run").rejected() == ["gmeta, seed 0: it answered too late"]


def test_with_scores_a_private_run_has_the_results_of_any_other(tmp_path, no_report):
    start(app_of(tmp_path, PRIVATE + "scores = true\n"), tmp_path, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert {row.group for row in run.rows()} == {"seen", "unseen"} and run.privacy().scores_sent


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_message_it_charges_what_it_would_have_charged(
    tmp_path, no_report, monkeypatch, step
):
    monkeypatch.setattr("secrets.randbits", lambda bits: 5)  # the same cohorts in every run
    app = app_of(tmp_path, PRIVATE)

    def run(name, tamper):
        """Each run has its own folder of sites."""
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return start(app, folder, folder / "run", tamper)

    messages = len(run("whole", untouched).requested)
    right, own = notes_of(tmp_path / "whole" / "run"), kept(tmp_path / "whole" / "sites")
    assert releases(right) == own and sum(own.values()) == 6 and messages == 2 * AGENTS + 6
    for number in range(1, messages + 1, step):
        left, replies, name = [number], [], f"killed-{number}"

        def kill(agent, message, reply, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return reply

        with pytest.raises(Killed):
            run(name, recording(replies, kill))
        run(name, recording(replies))
        notes = notes_of(tmp_path / name / "run")
        assert notes["ledger"]["rounds"] == right["ledger"]["rounds"]
        assert releases(notes) == own == kept(tmp_path / name / "sites")
        sent = {(agent, round): records["arrays"] for agent, round, records in replies}
        assert len(sent) == 6
        assert all(records["arrays"] == sent[a, k] for a, k, records in replies)


TWO = (
    PRIVATE + '[methods.gmeta]\n[methods.again]\nalgorithm = "gmeta"\nadapt_lr = 0.2\n'
)  # the same algorithm twice


def test_epsilon_is_the_total_over_all_methods_of_a_run(tmp_path, no_report):
    """Also if the run is killed between two methods, and if each is trained longer."""

    def kill(agent, message, reply):
        replies.append(agent)
        if message.content.get("method", {}).get("name") == "again" and not killed:
            killed.append(True)
            raise Killed
        return reply

    run, replies, killed = tmp_path / "run", [], []
    with pytest.raises(Killed):
        start(app_of(tmp_path, TWO), tmp_path, run, kill)
    start(app_of(tmp_path, TWO), tmp_path, run, kill)
    for rounds in (3, 4):
        app = app_of(tmp_path, TWO.replace("rounds = 3", f"rounds = {rounds}"))
        start(app, tmp_path, run)
        about = load_run(run).privacy()
        spent = planned(Privacy(0.5, 3.0), agents=3, cohort=2, rounds=2 * rounds)
        assert about.rounds == 2 * rounds
        assert about.epsilon.released == pytest.approx(spent.released)
        own = kept(tmp_path / "sites")
        assert sum(own.values()) == 2 * 2 * rounds and about.updates.charged == max(own.values())
        assert about.epsilon.server == server_epsilon(3.0, max(own.values()), 1e-5)
    # each has cohorts and noise of its own, though both begin with the same model
    parts = [run / "methods" / name / "seed-0" for name in ("gmeta", "again")]
    one, other = ([line["cohort"] for line in json_lines(p / "metrics.jsonl")] for p in parts)
    secret = read_sealed(run / "federation.json").about["cohort_seed"]
    seeds = [int(sha256(f"{secret} {part.parent.name}".encode())[:32], 16) for part in parts]
    for cohorts, seed in zip((one, other), seeds, strict=True):
        seen = app.plan().seen
        assert cohorts[1:] == [choose_cohort(seen, 0.75, seed, k) for k in (1, 2, 3, 4)]
    first, second = ((part / "model.safetensors").read_bytes() for part in parts)
    assert first != second


def test_after_a_private_method_that_fails_no_other_is_trained(tmp_path, no_report):
    """Sites keep their last noisy update only: they would send another one of the failed round."""

    def lose(agent, message, reply):
        return None if message.content.get("about", {}).get("round") == 2 else reply

    run, app = tmp_path / "run", app_of(tmp_path, TWO.replace("0.75", "1.0"))
    with pytest.raises(TrainingError, match="round 2 has no usable update"):
        start(app, tmp_path, run, lose)
    assert not (run / "methods" / "again" / "seed-0" / "metrics.jsonl").exists()
    start(app, tmp_path, run)
    about, own = load_run(run).privacy(), kept(tmp_path / "sites")
    assert about.updates.charged == about.updates.claimed == max(own.values()) == 6


def test_a_budget_is_for_all_methods_of_a_run(tmp_path, no_report):
    spends = planned(Privacy(0.5, 3.0), agents=3, cohort=2, rounds=3).released
    with pytest.raises(InputError, match="6 rounds with 2 of 3 agents"):
        app = app_of(
            tmp_path, TWO.replace("noise = 3.0", f"noise = 3.0\nepsilon = {spends * 1.01}")
        )
        start(app, tmp_path, tmp_path / "run")


def within_its_plan(folder, rounds=3):
    """A run whose budget allows three rounds without dropouts."""
    every = PRIVATE.replace("participation = 0.75", "participation = 1.0")
    every = every.replace("rounds = 3", f"rounds = {rounds}")
    spends = planned(Privacy(0.5, 3.0), agents=3, cohort=3, rounds=3).released
    return app_of(folder, f"{every}epsilon = {spends * 1.0001}\n"), spends


def test_no_request_is_sent_for_a_round_that_would_exceed_the_budget(tmp_path, no_report):
    app, _ = within_its_plan(tmp_path)
    replies, requested = [], []
    missing = in_round(app.plan().seen[0], 2, lost)
    for tamper in (missing, untouched):
        with pytest.raises(TrainingError, match="a round with 3 updates would bring epsilon"):
            start(app, tmp_path, tmp_path / "run", recording(replies, tamper), requested=requested)
    assert {round for _, round, _ in replies} == {1, 2}
    assert Counter(requested)["train", app.plan().seen[0]] == 2
    assert read_sealed(tmp_path / "run" / "privacy.json").about["rounds"] == 2
    shorter, _ = within_its_plan(tmp_path, rounds=2)
    start(shorter, tmp_path, tmp_path / "run")  # finishes with the current model
    assert load_run(tmp_path / "run").privacy().rounds == 2


def test_a_model_that_would_exceed_the_budget_is_discarded_and_the_run_resumes(tmp_path, no_report):
    (app, spends), run = within_its_plan(tmp_path), tmp_path / "run"
    with pytest.raises(TrainingError, match="a round with 2 updates would bring epsilon"):
        start(app, tmp_path, run, in_round(app.plan().seen[0], 3, lost))
    part = run / "methods" / "gmeta" / "seed-0"
    assert "would bring epsilon" in (part / "failure.json").read_text()
    assert saved_rounds(part)[-1] == 2
    stopped = read_sealed(run / "privacy.json").about
    assert stopped["rounds"] == 2
    assert stopped["epsilon"]["server"] == server_epsilon(3.0, 3, 1e-5), "all were seen"
    start(app, tmp_path, run)
    about = read_sealed(run / "privacy.json").about
    assert about["rounds"] == 3 and about["epsilon"]["released"] == pytest.approx(spends)
    assert about["epsilon"]["server"] == stopped["epsilon"]["server"]


def test_a_run_resumed_for_more_rounds_keeps_to_its_budgets(tmp_path, no_report):
    spends = planned(Privacy(0.5, 3.0), agents=3, cohort=2, rounds=3).released
    text = f"{PRIVATE}epsilon = {spends * 1.0001}\n"
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run")
    longer = app_of(tmp_path, text.replace("rounds = 3", "rounds = 4"))
    with pytest.raises(InputError, match="4 rounds with 2 of 3 agents"):
        start(longer, tmp_path, tmp_path / "run")
    assert load_run(tmp_path / "run").methods  # unchanged


def test_a_private_run_does_not_fall_back_to_an_older_checkpoint(tmp_path, no_report):
    def kill(message, reply):
        raise Killed

    every = PRIVATE.replace("participation = 0.75", "participation = 1.0")
    app, run = app_of(tmp_path, every), tmp_path / "run"
    with pytest.raises(Killed):
        start(app, tmp_path, run, in_round(app.plan().seen[0], 3, kill))
    newest = run / "methods" / "gmeta" / "seed-0" / "checkpoint-000002.safetensors"
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(RunError, match="does not record all privacy spent"):
            start(app, tmp_path, run)
    newest.write_bytes(content)
    start(app, tmp_path, run)
    assert sum(releases(notes_of(run)).values()) == 9
