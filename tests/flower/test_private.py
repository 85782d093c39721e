"""With [privacy] only clipped and noisy updates leave a site, and every one of them is counted."""

import html
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import nufed
from flower.in_memory import RUN, MemoryGrid, agents_data, federate, plan_of
from flower.test_app import TEXT, Killed, app_of, start
from nufed import FirstOrder, GMeta, InputError
from nufed.aggregate import Mean, Median
from nufed.errors import RunError, TrainingError
from nufed.flower.epsilon import server_epsilon
from nufed.flower.memory import load_memory
from nufed.flower.privacy import Privacy, planned
from nufed.flower.server import Server
from nufed.flower.site import client_app
from nufed.runs import load_run
from nufed.runs.durable import read_signed
from nufed.server import Rules, choose_cohort
from support import Scaffold

FEDAVG = GMeta(0, 0.2, 0.3, 1, 6, FirstOrder())
AGENTS, ROUNDS, BAD = 4, 3, 2
DATA = agents_data(AGENTS)
NOISY = Privacy(clip=0.05, noise=3.0)
PRIVATE = TEXT + "[privacy]\nclip = 0.5\nnoise = 3.0\n"


def untouched(agent, message, reply):
    return reply


def recording(replies, tamper=untouched):
    """Notes what leaves every site when it trains: (agent, round, records)."""

    def look(agent, message, reply):
        if message.metadata.message_type == "train" and not reply.has_error():
            replies.append((agent, message.content["about"]["round"], reply.content))
        return tamper(agent, message, reply)

    return look


def in_round(agent, round, change):
    """Changes the answer of one agent to the first question of one round."""
    first = []

    def tamper(who, message, reply):
        about, number = message.content.get("about", {}), message.metadata.message_id
        if who == agent and about.get("round") == round:
            first.append(number)
            return change(message, reply) if number == first[0] else reply
        return reply

    return tamper


def lost(message, reply):
    return None


def first_changes(privacy):
    """What the sites send in the first round, less what they received."""
    replies, plan = [], plan_of(FEDAVG, rounds=1, privacy=privacy)
    federate(plan, DATA, recording(replies))
    sent = [torch.from_numpy(records["arrays"]["model"].numpy()) for _, _, records in replies]
    return torch.stack(sent) - plan.start()["model"]


def grid_of(plan, folder, tamper=untouched):
    site = client_app(lambda: plan, lambda config: DATA[config["partition-id"]])
    return MemoryGrid(site, range(plan.agents), folder, tamper)


def releases(notes):
    """How many noisy updates of every agent the server has charged."""
    return {int(a): sum(s.values()) for a, s in notes["ledger"]["releases"].items()}


def kept(folder):
    """How many noisy updates every site says itself that it made."""
    files = Path(folder).glob("*/agent-*")
    return {int(file.name[6:]): load_memory(file, {}).release.count for file in files}


def test_what_leaves_a_site_is_its_change_clipped_and_with_noise():
    true = first_changes(None)
    lengths = true.norm(dim=1, keepdim=True)
    clip = float(lengths.median())
    clipped = true * (clip / lengths).clamp(max=1)
    assert not torch.equal(clipped, true)
    almost = first_changes(Privacy(clip, noise=1e-9))
    assert torch.allclose(almost, clipped, atol=1e-7) and not torch.equal(almost, clipped)
    noise = first_changes(Privacy(clip, noise=3.0)) - clipped
    assert noise.std() / (3 * clip) == pytest.approx(1, rel=0.3)  # 7 of its standard deviations
    assert len(noise.unique()) == noise.numel()


def test_no_two_runs_have_the_same_noise_and_no_site_tells_its_number_of_samples():
    runs = [], []
    for replies in runs:
        federate(plan_of(FEDAVG, privacy=NOISY), DATA, recording(replies))
    for (_, _, first), (_, _, second) in zip(*runs, strict=True):
        one, other = (r["arrays"]["model"].numpy() for r in (first, second))
        assert not (one == other).any()
        assert first["about"]["samples"] == 1
        assert first["about"].keys() == {"agent", "round", "samples", "gradients", "hvps", "began"}


def test_a_round_tried_again_gets_the_very_same_updates_for_nothing(tmp_path):
    replies, rules = [], Rules(min_updates=AGENTS, attempts=2)
    plan = plan_of(FEDAVG, privacy=NOISY, rules=rules)
    grid = grid_of(plan, tmp_path, recording(replies, in_round(BAD, 2, lost)))
    server = Server(plan, grid, RUN)
    *_, last = server.train()
    assert last.round == ROUNDS
    answers = {(agent, id(records)) for agent, round, records in replies if round == 2}
    assert Counter(agent for agent, _ in answers) == dict.fromkeys(range(AGENTS), 2)
    sent = {(a, k, r["arrays"]["model"].data, r["release"]["count"]) for a, k, r in replies}
    assert len(sent) == AGENTS * ROUNDS
    assert releases(server.notes) == kept(tmp_path) == dict.fromkeys(range(AGENTS), ROUNDS)


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_site_that_lost_its_store_counts_in_another(how, tmp_path):
    plan = plan_of(FEDAVG, privacy=NOISY)

    def lose(message, reply):
        (file,) = tmp_path.glob(f"*/agent-{BAD}")
        content = file.read_bytes()
        file.unlink()
        if how == "damaged":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return reply

    server = Server(plan, grid_of(plan, tmp_path, in_round(BAD, 1, lose)), RUN)
    list(server.train())
    stores = server.notes["ledger"]["releases"]
    assert list(stores[str(BAD)].values()) == [1, ROUNDS - 1] and len(stores["0"]) == 1


def test_the_noisy_update_of_a_site_that_lost_its_store_is_charged_again(tmp_path):
    plan, file = plan_of(FEDAVG, rounds=1, privacy=NOISY), tmp_path / RUN / f"agent-{BAD}"
    first = Server(plan, grid_of(plan, tmp_path), RUN)
    list(first.train())
    file.unlink()
    again = Server(plan, grid_of(plan, tmp_path), RUN, first.notes)  # killed before its checkpoint
    list(again.train())
    assert releases(again.notes) == {0: 1, 1: 1, BAD: 2, 3: 1}


def changed(**changes):
    return lambda reply: ConfigRecord({**reply.content["release"], **changes})


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        (lambda reply: None, "it sent no ConfigRecord called 'release'"),
        (lambda reply: ConfigRecord({}), "it says [] of its noisy update"),
        (changed(count=0), "its number of noisy updates is 0"),
        (changed(count=-1), "its number of noisy updates is -1"),
        (changed(count=10**12), "its number of noisy updates is 1000000000000"),
        (changed(count="1"), "its number of noisy updates is '1'"),
        (changed(store="../elsewhere"), "is not named by 32 hexadecimal digits"),
        (changed(more=1), "of its noisy update"),
    ],
)
def test_a_reply_that_does_not_say_which_update_it_is_gets_named_and_left_out(release, reason):
    def change(message, reply):
        records = {**reply.content, "release": release(reply)}
        return Message(
            RecordDict({k: v for k, v in records.items() if v is not None}), reply_to=message
        )

    rounds, _, _ = federate(plan_of(FEDAVG, privacy=NOISY), DATA, in_round(BAD, 2, change))
    assert [(r.agent, r.round) for p in rounds for r in p.rejected] == [(BAD, 2)]
    assert reason in rounds[2].rejected[0].reason


def test_a_noisy_update_that_is_left_out_is_charged_all_the_same(tmp_path):
    def spoil(message, reply):
        bad = ArrayRecord({"model": Array(np.full(66, np.nan))})
        return Message(RecordDict({**reply.content, "arrays": bad}), reply_to=message)

    plan = plan_of(FEDAVG, rounds=1, privacy=NOISY)
    server = Server(plan, grid_of(plan, tmp_path, in_round(BAD, 1, spoil)), RUN)
    *_, last = server.train()
    assert [r.agent for r in last.rejected] == [BAD]
    assert releases(server.notes) == dict.fromkeys(range(AGENTS), 1)
    assert server.notes["ledger"]["rounds"] == [[AGENTS, AGENTS, AGENTS - 1, 1]]


def budget(updates, noise=NOISY.noise):
    return server_epsilon(noise, updates, NOISY.delta) * 1.0001


def test_a_site_goes_by_the_larger_of_its_own_count_and_the_servers(tmp_path):
    private = replace(NOISY, epsilon_server=budget(2))
    plan = plan_of(FEDAVG, rounds=2, privacy=private)
    server = Server(plan, grid_of(plan, tmp_path), RUN)
    *_, last = server.train()
    longer = replace(plan, rounds=3)
    forgetful = Server(longer, grid_of(longer, tmp_path), RUN)
    with pytest.raises(TrainingError, match="one noisy update more than 2 would bring"):
        list(forgetful.train(last))
    for file in tmp_path.glob("*/agent-*"):
        file.unlink()
    with pytest.raises(TrainingError, match="one noisy update more than 2 would bring"):
        list(Server(longer, grid_of(longer, tmp_path), RUN, server.notes).train(last))
    assert not list(tmp_path.glob("*/agent-*"))


def test_a_site_with_a_limit_of_its_own_is_named_and_the_run_goes_on_without_it():
    def limit(grid):
        grid.contexts[grid.node_of(BAD)].node_config["epsilon"] = budget(1)

    rounds, _, _ = federate(plan_of(FEDAVG, privacy=NOISY), DATA, prepare=limit)
    assert [[r.agent for r in p.rejected] for p in rounds] == [[], [], [BAD], [BAD]]
    assert "more than 1 would bring this site's epsilon" in rounds[2].rejected[0].reason
    rules = Rules(min_updates=AGENTS, attempts=1)
    with pytest.raises(TrainingError, match="this site's epsilon against the server"):
        federate(plan_of(FEDAVG, privacy=NOISY, rules=rules), DATA, prepare=limit)


@pytest.mark.parametrize(("noise", "says"), [(3.0, "more than 3"), (1.5, "more than 1 ")])
def test_a_sites_own_limit_is_over_all_runs(noise, says, tmp_path):
    def rounds_of(plan, run):
        grid = grid_of(plan, tmp_path)
        for context in grid.contexts.values():
            context.node_config["epsilon"] = budget(3)
        return list(Server(plan, grid, run).train())

    rounds_of(plan_of(FEDAVG, rounds=3, privacy=NOISY), RUN)
    other = plan_of(FEDAVG, rounds=1, privacy=replace(NOISY, noise=noise))
    with pytest.raises(TrainingError, match=f"one noisy update {says}"):
        rounds_of(other, RUN[::-1])


@pytest.mark.parametrize(("limit", "privacy"), [(1.0, None), (0, NOISY), ("1", NOISY)])
def test_a_site_with_a_limit_takes_no_part_where_nothing_bounds_what_it_tells(limit, privacy):
    def prepare(grid):
        grid.contexts[grid.node_of(BAD)].node_config["epsilon"] = limit

    rounds, _, _ = federate(plan_of(FEDAVG, rounds=1, privacy=privacy), DATA, prepare=prepare)
    (left_out,) = rounds[1].rejected
    assert left_out.agent == BAD and "epsilon" in left_out.reason


@pytest.mark.parametrize("scores", [False, True])
def test_a_site_gives_no_scores_unless_they_are_to_be_sent(scores, tmp_path):
    plan = plan_of(FEDAVG, rounds=1, privacy=replace(NOISY, scores=scores))
    grid = grid_of(plan, tmp_path)
    server = Server(plan, grid, RUN)
    *_, last = server.train()
    assert len(server.evaluate(last).scores) == AGENTS * scores
    assert (("evaluate", 0) in grid.asked) == scores
    curious = Server(replace(plan, privacy=replace(NOISY, scores=True)), grid, RUN)
    list(curious.train(last))
    missing = {error.reason for error in curious.evaluate(last).missing}
    refused = "it failed: this site sends no scores: privacy.scores is false"
    assert missing == (set() if scores else {refused})


@dataclass(frozen=True)
class Telling(Scaffold):
    """Sends more than it receives, and keeps nothing."""

    receives = ("model",)
    aggregation: Mean = Mean()

    def client_init(self, w):
        return {}


@pytest.mark.parametrize(
    ("algorithm", "rules", "what"),
    [
        (replace(FEDAVG, aggregation=Mean("samples")), Rules(), "uniform mean"),
        (replace(FEDAVG, aggregation=Median()), Rules(), "uniform mean"),
        (FEDAVG, Rules(max_update_norm=3.0), "max_update_norm"),
        (Scaffold(), Rules(), "uniform mean"),
        (Telling(), Rules(), "send vectors that they do not receive"),
    ],
)
def test_what_epsilon_does_not_hold_for_is_refused(algorithm, rules, what):
    with pytest.raises(InputError, match=f"epsilon does not hold with .*{what}"):
        plan_of(algorithm, rules=rules, privacy=NOISY)
    plan_of(algorithm, rules=rules)


def test_an_algorithm_that_keeps_a_state_at_sites_is_refused():
    @dataclass(frozen=True)
    class Averaged(Scaffold):
        aggregation: Mean = Mean()

    with pytest.raises(InputError, match="agents keep a state"):
        plan_of(Averaged(), privacy=NOISY)


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
    with pytest.raises(InputError, match="privacy is for federations"):
        nufed.run(tmp_path / "simulated.toml", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr("nufed.report.build_report", lambda runs, out: out)  # it takes a while


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
    page = html.unescape(page.split("</script>", 1)[1])
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


def within_its_plan(folder):
    """A run of three rounds whose budget allows no missing site."""
    every = PRIVATE.replace("participation = 0.75", "participation = 1.0")
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
