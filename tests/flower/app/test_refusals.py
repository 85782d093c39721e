"""Sites whose data can't be used: the run stops at once, with their names and their own words."""

from dataclasses import replace

import pytest
from flwr.app import Context, Error, Message, RecordDict
from torch import nn

from flower.app.in_memory import MemoryGrid, agents_data, federate, plan_of
from flower.app.test_apps import AGENTS, TEXT, app_of, start, trains
from flower.app.test_faults import FEDAVG
from nufed import InputError, Objective, fedavg
from nufed.errors import TrainingError
from nufed.flower.app.replies import _failure
from nufed.flower.app.site import Site
from nufed.server import Rules

WRONG = TEXT.replace("input_shape = [5]", "input_shape = [6]")


def test_a_wrong_input_shape_ends_the_run_before_any_training(tmp_path):
    requested = []
    with pytest.raises(TrainingError) as stopped:
        start(app_of(tmp_path, WRONG), tmp_path, tmp_path / "run", requested=requested)
    reason = str(stopped.value)
    assert "this site's inputs have shape (5,): federation.input_shape is [6]" in reason
    assert all(f"site {number}" in reason for number in range(AGENTS))
    assert reason.count("this site's inputs") == 1 and "meta_lr" not in reason
    assert not trains(requested)
    assert [kind for kind, _ in requested].count("evaluate") == AGENTS  # each was asked once
    assert reason in (tmp_path / "run" / "log.txt").read_text()


def test_without_scores_it_ends_in_the_first_attempt_at_a_round(tmp_path):
    requested = []
    private = WRONG + "[privacy]\nclip = 1.0\n"
    with pytest.raises(TrainingError, match=r"0 of 3 sites can train.*shape \(5,\)"):
        app = app_of(tmp_path, private.replace("0.75", "1.0"))
        start(app, tmp_path, tmp_path / "run", requested=requested)
    assert trains(requested) == AGENTS - 1  # one is unseen in training


def test_sites_are_named_with_their_names(tmp_path):
    app = app_of(tmp_path, WRONG)
    grid = MemoryGrid(app.site, (), tmp_path / "sites")
    for number in range(AGENTS):
        grid.add(number, name=f"Ward {number}")
    with pytest.raises(TrainingError, match=r"site 0 \(Ward 0\), site 1 \(Ward 1\)"):
        app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "run")}))


def test_a_run_goes_on_as_long_as_a_quorum_can_train():
    data = [*agents_data(2), None, None]
    plan = plan_of(FEDAVG, rules=Rules(min_updates=2))
    rounds, _, _ = federate(plan, data)
    assert len(rounds) == plan.rounds + 1
    with pytest.raises(TrainingError, match=r"2 of 4 sites can train, and a round needs 3"):
        federate(replace(plan, rules=Rules(min_updates=3)), data)


def test_a_site_that_has_worked_before_is_retried():
    def fails_later(agent, message, reply):
        second = message.content.get("about", {}).get("round") == 2
        if not second or len(attempts) == AGENTS:
            return reply
        attempts.append(agent)
        text = "<class 'nufed.errors.InputError'>:<'the disk is away'>"
        return Message(Error(2, text), reply_to=message)

    attempts = []
    rounds, _, _ = federate(plan_of(FEDAVG), agents_data(AGENTS), fails_later)
    assert len(attempts) == AGENTS and rounds[2].attempts == 2


def test_only_errors_of_input_are_final():
    assert _failure("<class 'nufed.errors.InputError'>:<'no'>").refused
    for text in ("<class 'nufed.errors.TrainingError'>:<'no'>", "nufed.errors.InputError", ""):
        assert not _failure(text).refused


def test_a_batch_of_one_sample_is_refused_by_its_site_with_the_remedy(tmp_path):
    """Of 17 training samples in batches of 4 an epoch leaves one, which BatchNorm can't take."""
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    algorithm = fedavg(meta_lr=0.1, batch_size=4, local_epochs=1)
    tracked = Objective(net, running_stats="tracked")
    plan = replace(plan_of(algorithm, agents=2), objective=tracked, test=0.5)
    ((inputs, targets),) = agents_data(1, samples=34)

    def site_with(number):
        config = {"partition-id": 0, "folder": str(tmp_path)}
        return Site(plan, config, lambda _: (inputs[:number], targets[:number]))

    with pytest.raises(InputError, match=r"its last batch has one sample.*choose another batch"):
        _ = site_with(34).federation
    assert len(site_with(32).federation.split.train[0]) == 16
