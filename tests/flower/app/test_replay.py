"""A simulation that replays the recorded participants gives a disturbed federation's bits."""

import random
import sys
from pathlib import Path

import pytest
from flwr.app import Error, Message
from safetensors.torch import load_file, save_file

from flower.app.test_apps import DATA, TEXT, app_of, start
from nufed.errors import TrainingError
from support import Killed

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from soak_checks import WINDOW, Memory, different_rounds, recorded_rounds

ROUNDS = 6
SETTINGS = TEXT.replace("rounds = 3", f"rounds = {ROUNDS}\nsave_every = 1\nmin_updates = 2")
SETTINGS = SETTINGS.replace("participation = 0.75", "participation = 1.0")


def disturbed(seed):
    """Replies of a training site are lost or fail, or the server is killed, per message."""

    def tamper(agent, message, reply):
        if message.metadata.message_type != "train":
            return reply
        draw = random.Random(f"{seed}, {message.metadata.message_id}").random()
        if draw < 0.08:
            raise Killed
        if draw < 0.3:
            return Message(Error(2, "<class 'OSError'>:<'gone'>"), reply_to=message)
        return None if draw < 0.5 else reply

    return tamper


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("algorithm", ["gmeta", "scaffold"])
def test_a_replay_of_the_recorded_participants_gives_the_same_bits_in_every_round(
    algorithm, tmp_path
):
    app = app_of(tmp_path, SETTINGS.replace("[method]", f'[method]\nalgorithm = "{algorithm}"'))
    out, kills = tmp_path / "run", 0
    while True:
        try:
            start(app, tmp_path, out, disturbed(seed=kills))
            break
        except (Killed, TrainingError):
            kills += 1
    rounds, folder = recorded_rounds(out)
    left_out = [line.round for line in rounds if line.participants != line.cohort]
    assert kills and len(left_out) > 1 and any(line.attempts > 1 for line in rounds)
    assert different_rounds(out, app.plan(), DATA) == []
    path = folder / "model-round-000005.safetensors"
    changed = load_file(path)
    changed["model"][0] += 1e-6
    save_file(changed, path)
    assert different_rounds(out, app.plan(), DATA) == [5]


def test_growth_is_measured_in_processes_that_live_long_enough(monkeypatch):
    pages = {"1": 0, "2": 0}
    monkeypatch.setattr(Path, "read_text", lambda path: f"0 {pages[path.parent.name]} 0")
    memory = Memory(warm_up=100.0)
    for age in range(0, int(100 + 2 * WINDOW) + 1, 10):
        pages["1"] = 250 + age  # grows
        memory.sample("site", 1, age)
        if age < 200:
            memory.sample("server", 2, age)
    (found,) = memory.growth().items()
    name, growth = found
    assert name == "site" and growth["processes"] == 1
    first, last = 250 + 125, 250 + 195
    assert growth["kib"] == 4 * last and growth["growth"] == last / first - 1
