"""What a private run leaves, refuses and charges, also after it was killed."""

import html
import json
import re
from collections import Counter

import pytest

import nufed
from flower.test_app import AGENTS, TEXT, Killed, app_of, start
from flower.test_private import in_round, kept, lost, recording, releases, untouched
from nufed import InputError
from nufed.errors import RunError, TrainingError
from nufed.flower.epsilon import server_epsilon
from nufed.flower.privacy import Privacy, planned
from nufed.runs import load_run
from nufed.runs.durable import read_signed
from nufed.server import choose_cohort

PRIVATE = TEXT + "[privacy]\nclip = 0.5\nnoise = 3.0\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (PRIVATE + "epsilon = 0.1\n", "epsilon = 0.1: 3 rounds with 2 of 3 agents"),
        (PRIVATE + "epsilon_server = 0.1\n", "epsilon_server = 0.1: 3 rounds"),
        (PRIVATE + "delta = 0.5\n", "delta = 0.5: must be below 1/agents"),
        (PRIVATE.replace("clip = 0.5\n", ""), "privacy.clip is not set, so there would be no"),
        ("max_update_norm = 3.0" + PRIVATE, "does not hold with max_update_norm"),
        (PRIVATE.replace("adapt_lr", 'averaging = "samples"\nadapt_lr'), "their uniform mean"),
    ],
)
def test_a_private_plan_that_can_not_be_kept_is_refused_before_anything_happens(
    text, sentence, tmp_path
):
    asked = []
    with pytest.raises(InputError, match=re.escape(sentence)):
        start(app_of(tmp_path, text), tmp_path, tmp_path / "run", asked=asked)
    assert not asked and [path.name for path in tmp_path.iterdir()] == ["federation.toml"]


def test_a_simulation_does_not_pretend_to_be_private(tmp_path):
    (tmp_path / "simulated.toml").write_text(PRIVATE)
    with pytest.raises(InputError, match="is for sites that keep their data"):
        nufed.run(tmp_path / "simulated.toml", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out, **_: out)  # it takes a while


def notes_of(run):
    *_, newest = sorted((run / "methods" / "gmeta" / "seed-0").glob("checkpoint-*.json"))
    return read_signed(newest)["notes"]


def lines_of(run):
    """The metrics of its rounds, but for those of the start."""
    text = (run / "methods" / "gmeta" / "seed-0" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()[1:]]


def test_a_private_run_says_what_it_spent_and_not_how_good_it_is(tmp_path):
    run, asked = tmp_path / "run", []
    start(app_of(tmp_path, PRIVATE), tmp_path, run, in_round(0, 2, lost), asked=asked)
    assert {kind for kind, _ in asked} == {"query", "train"}
    about, lines = read_signed(run / "privacy.json"), lines_of(run)
    assert [about[key] for key in ("agents", "cohort", "rounds", "clip")] == [3, 2, 3, 0.5]
    assert about["epsilon"] == lines[-1]["epsilon"]
    spent = [line["epsilon"]["released"] for line in lines]
    assert 0 < spent[0] < spent[1] < spent[2]
    assert not any("evaluation" in line for line in lines)
    log, page = ((run / name).read_text() for name in ("log.txt", "report.html"))
    page = html.unescape(page[page.rindex("<h1>") :])
    told = f"{about['epsilon']['released']:.4g}"
    assert f"epsilon {told} of the released model" in log
    assert f"<td>{told}: for all who see the models" in page and "Sites sent no scores" in page
    assert json.loads((run / "results.json").read_text())["rows"] == []
    trained = nufed.load_bundle(run / "bundles" / "gmeta.nufed").about.trained
    assert told in trained["privacy"]
    for number in range(AGENTS):
        assert f"agent {number}" not in page


def test_cohorts_come_from_a_seed_that_only_the_server_knows(tmp_path, no_report):
    seeds = set()
    for name in ("one", "other"):
        start(app_of(tmp_path, PRIVATE), tmp_path, tmp_path / name)
        seed = read_signed(tmp_path / name / "federation.json")["cohort_seed"]
        seen = app_of(tmp_path, PRIVATE).plan().seen
        right = [choose_cohort(seen, 0.75, seed, k) for k in (1, 2, 3)]
        assert [line["cohort"] for line in lines_of(tmp_path / name)] == right
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
        seeds.add(seed)
    assert len(seeds) == 2 and 0 not in seeds


def test_of_a_private_run_the_report_does_not_name_who_was_asked(tmp_path, no_report):
    every = PRIVATE.replace("participation = 0.75", "participation = 1.0")
    seen = app_of(tmp_path, every).plan().seen
    start(app_of(tmp_path, every), tmp_path, tmp_path / "run", in_round(seen[0], 2, lost))
    assert lines_of(tmp_path / "run")[1]["rejected"][0]["agent"] == seen[0]
    assert load_run(tmp_path / "run").rejected() == ["gmeta, seed 0: it answered too late"]


def test_with_scores_a_private_run_has_the_results_of_any_other(tmp_path, no_report):
    start(app_of(tmp_path, PRIVATE + "scores = true\n"), tmp_path, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert {row.group for row in run.rows()} == {"seen", "unseen"} and run.privacy()["scores_sent"]


def test_killed_at_any_message_it_charges_what_it_would_have_charged(
    tmp_path, no_report, monkeypatch
):
    monkeypatch.setattr("secrets.randbits", lambda bits: 5)  # the same cohorts in every run
    app = app_of(tmp_path, PRIVATE)

    def run(name, tamper):
        """Of each start the sites have the folder of their run."""
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return start(app, folder, folder / "run", tamper)

    messages = len(run("whole", untouched).asked)
    right, own = notes_of(tmp_path / "whole" / "run"), kept(tmp_path / "whole" / "sites")
    assert releases(right) == own and sum(own.values()) == 6 and messages == AGENTS + 6
    for number in range(1, messages + 1):
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


def within_its_plan(folder, rounds=3):
    """A run whose budget allows three rounds, and no missing site."""
    every = PRIVATE.replace("participation = 0.75", "participation = 1.0")
    every = every.replace("rounds = 3", f"rounds = {rounds}")
    spends = planned(Privacy(0.5, 3.0), agents=3, cohort=3, rounds=3).released
    return app_of(folder, f"{every}epsilon = {spends * 1.0001}\n"), spends


def test_nobody_is_asked_for_a_round_that_would_go_over_the_budget(tmp_path, no_report):
    app, _ = within_its_plan(tmp_path)
    replies, asked = [], []
    missing = in_round(app.plan().seen[0], 2, lost)
    for tamper in (missing, untouched):
        with pytest.raises(TrainingError, match="a round with 3 updates would bring epsilon"):
            start(app, tmp_path, tmp_path / "run", recording(replies, tamper), asked=asked)
    assert {round for _, round, _ in replies} == {1, 2}
    assert Counter(asked)["train", app.plan().seen[0]] == 2
    assert read_signed(tmp_path / "run" / "privacy.json")["rounds"] == 2
    shorter, _ = within_its_plan(tmp_path, rounds=2)
    start(shorter, tmp_path, tmp_path / "run")  # ends with the model that there is
    assert load_run(tmp_path / "run").privacy()["rounds"] == 2


def test_a_model_that_would_go_over_the_budget_is_not_kept_and_the_run_can_go_on(
    tmp_path, no_report
):
    (app, spends), run = within_its_plan(tmp_path), tmp_path / "run"
    with pytest.raises(TrainingError, match="a round with 2 updates would bring epsilon"):
        start(app, tmp_path, run, in_round(app.plan().seen[0], 3, lost))
    part = run / "methods" / "gmeta" / "seed-0"
    assert "would bring epsilon" in (part / "failure.json").read_text()
    assert max(path.name for path in part.glob("checkpoint-*.json")) == "checkpoint-000002.json"
    stopped = read_signed(run / "privacy.json")
    assert stopped["rounds"] == 2
    assert stopped["epsilon"]["server"] == server_epsilon(3.0, 3, 1e-5), "all were seen"
    start(app, tmp_path, run)
    about = read_signed(run / "privacy.json")
    assert about["rounds"] == 3 and about["epsilon"]["released"] == pytest.approx(spends)
    assert about["epsilon"]["server"] == stopped["epsilon"]["server"]


def test_a_run_that_goes_on_for_longer_keeps_to_its_budgets(tmp_path, no_report):
    spends = planned(Privacy(0.5, 3.0), agents=3, cohort=2, rounds=3).released
    text = f"{PRIVATE}epsilon = {spends * 1.0001}\n"
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run")
    longer = app_of(tmp_path, text.replace("rounds = 3", "rounds = 4"))
    with pytest.raises(InputError, match="4 rounds with 2 of 3 agents"):
        start(longer, tmp_path, tmp_path / "run")
    assert load_run(tmp_path / "run").methods  # and what is there stays


def test_a_damaged_checkpoint_is_not_gone_behind(tmp_path, no_report):
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
        with pytest.raises(RunError, match="does not know what privacy it cost"):
            start(app, tmp_path, run)
    newest.write_bytes(content)
    start(app, tmp_path, run)
    assert sum(releases(notes_of(run)).values()) == 9
