"""Agents' states on disk: same bits after a kill, bounded memory and disk, damage is named."""

import io
import os
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from nufed.errors import RunError
from nufed.lab.files import seal
from nufed.lab.runs.agent_states import OVERHEAD, Inventory, StoredStates

BELONGS = {"configuration": "a", "data": "b", "split": "c"}
SIZE = 8
ROOM = OVERHEAD + 4 * SIZE  # of one state in the cache


def state(agent, round):
    return {"control": torch.arange(SIZE, dtype=torch.float32) + 1000 * agent + round}


def cohort(round, agents=30, size=5):
    return np.random.default_rng(round).choice(agents, size, replace=False).tolist()


def play(states, rounds, agents=30):
    """Simulates rounds of a run; returns the expected state of every agent."""
    right = {}
    for round in rounds:
        for agent in cohort(round, agents):
            states.get(agent)
            right[agent] = round
        states.put(round, {agent: state(agent, round) for agent in cohort(round, agents)})
    return right


def check(states, right, agents=30):
    assert list(states.agents()) == sorted(right)
    for agent in range(agents):
        found = states.get(agent)
        if agent in right:
            assert torch.equal(found["control"], state(agent, right[agent])["control"])
        else:
            assert found is None


def files_of(folder):
    return Counter(path.name for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("cache", [10**9, 3 * ROOM, 0])
def test_any_cache_gives_the_latest_state_of_every_agent(tmp_path, cache):
    states = StoredStates(tmp_path, BELONGS, cache_bytes=cache)
    right = play(states, range(1, 21))
    check(states, right)
    states.flush(20)
    check(StoredStates(tmp_path, BELONGS, [20], cache_bytes=cache), right)


def test_the_cache_is_bounded_and_keeps_no_larger_tensor_alive(tmp_path):
    states = StoredStates(tmp_path, BELONGS, cache_bytes=3 * ROOM)
    for round in range(1, 21):
        stack = torch.zeros(5, SIZE)
        states.put(round, {a: {"control": stack[i]} for i, a in enumerate(cohort(round))})
        held = [vector for _, own in states._cache.values() for vector in own.values()]
        assert len(held) <= 3 and all(v.untyped_storage().nbytes() == 4 * SIZE for v in held)


@pytest.mark.parametrize("cache", [10**9, 3 * ROOM])
@pytest.mark.parametrize("killed", range(11, 16))
def test_after_a_kill_states_are_those_of_the_checkpoint_and_resume_to_the_same(
    tmp_path, cache, killed
):
    """Killed in any round after the checkpoint, before or during the next save."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    right = play(run := StoredStates(whole, BELONGS, cache_bytes=cache), range(1, 11))
    saved = run.flush(10)
    at_ten = dict(right)
    right |= play(run, range(11, killed + 1))
    shutil.copytree(whole, folder)
    run._write(*next((a, *run._cache[a]) for a in cohort(killed) if a in run._cache))
    half = next(iter(sorted(whole.glob(f"states/{killed:06d}/*"))))
    (folder / half.parent.relative_to(whole)).mkdir(exist_ok=True)
    (folder / half.relative_to(whole)).write_bytes(half.read_bytes()[:50])

    again = StoredStates(folder, BELONGS, [10], cache_bytes=cache)
    again.begin(saved)
    check(again, at_ten)
    assert not [p for p in folder.glob("states/*") if int(p.name) > 10]
    play(again, range(11, killed + 1))
    check(again, right)


def test_the_checkpoint_before_the_last_can_be_resumed_from(tmp_path):
    states = StoredStates(tmp_path, BELONGS, cache_bytes=3 * ROOM)
    rights, saved = {}, {}
    for round in range(1, 41):
        rights[round] = {**rights.get(round - 1, {}), **play(states, [round])}
        if round % 10 == 0:
            saved[round] = states.flush(round)
    for kept in ([30, 40], [30]):
        again = StoredStates(tmp_path, BELONGS, kept)
        again.begin(saved[kept[-1]])
        check(again, rights[kept[-1]])


@pytest.mark.parametrize("every", [1, 3, 100])
def test_an_agent_has_at_most_three_files_and_two_at_the_end(tmp_path, every):
    states = StoredStates(tmp_path, BELONGS, cache_bytes=3 * ROOM)
    for round in range(1, 61):
        play(states, [round])
        if round % every == 0:
            states.flush(round)
        assert max(files_of(tmp_path).values(), default=0) <= 3
    states.flush(60)
    states.prune()
    assert max(files_of(tmp_path).values()) <= 2
    assert all(any(path.iterdir()) for path in tmp_path.glob("states/*"))


def test_files_do_not_depend_on_the_cache_or_on_a_stop_in_between(tmp_path):
    def names(folder, stops, cache):
        states = StoredStates(folder, BELONGS, cache_bytes=cache)
        for round in range(1, 31):
            play(states, [round])
            if round in stops:
                states.flush(round)
        states.prune()
        return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.safetensors")}

    once = names(tmp_path / "once", {20, 30}, 10**9)
    assert names(tmp_path / "often", {7, 10, 13, 20, 30}, 10**9) == once
    assert names(tmp_path / "evicted", {20, 30}, 2 * ROOM) == once


def test_states_without_vectors_are_not_stored(tmp_path):
    states = StoredStates(tmp_path, BELONGS)
    states.put(1, {3: {}})
    assert states.flush(1) == Inventory()
    assert states.get(3) is None and not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path):
    states = StoredStates(tmp_path, BELONGS)
    states.put(1, {7: state(7, 1), 8: state(8, 1)})
    return states.flush(1)


def test_a_damaged_state_is_named(tmp_path, saved):
    path = tmp_path / "states/000001/7.safetensors"
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(RunError, match=rf"{path} is damaged.*remove {tmp_path} and continue"):
            StoredStates(tmp_path, BELONGS, [1]).get(7)


@pytest.mark.parametrize(
    ("key", "value"),
    [("agent", 8), ("round", 2), ("belongs_to", {**BELONGS, "data": "other"})],
)
def test_a_foreign_state_is_named(tmp_path, saved, key, value):
    path = tmp_path / "states/000001/7.safetensors"
    about = {"agent": 7, "round": 1, "belongs_to": BELONGS, key: value}
    path.write_bytes(b"".join(seal(about, state(7, 1))))
    with pytest.raises(RunError, match=f"{path} is not the state of agent 7.*its {key} differs"):
        StoredStates(tmp_path, BELONGS, [1]).get(7)


def test_a_missing_state_is_detected_on_resume(tmp_path, saved):
    StoredStates(tmp_path, BELONGS, [1]).begin(saved)
    (tmp_path / "states/000001/8.safetensors").unlink()
    with pytest.raises(RunError, match="states of 1 agents, which do not match the checkpoint"):
        StoredStates(tmp_path, BELONGS, [1]).begin(saved)


def test_what_a_round_and_a_checkpoint_touch_does_not_depend_on_how_many_have_a_state(
    tmp_path, monkeypatch
):
    def calls(agents):
        folder = tmp_path / str(agents)
        states = StoredStates(folder, BELONGS, cache_bytes=3 * ROOM)
        for round in range(1, agents // 5 + 1):
            states.put(round, {a: state(a, round) for a in range(5 * round - 5, 5 * round)})
            states.flush(round)
        seen = Counter()
        with monkeypatch.context() as patch:
            patch.setattr(io, "open", counted(seen, io.open))
            for name in ("fsync", "unlink", "rmdir", "listdir", "scandir"):
                patch.setattr(os, name, counted(seen, getattr(os, name)))
            taking_part = [3, agents // 2, agents // 2 + 7, agents - 12, agents - 20]
            for agent in taking_part:
                states.get(agent)
            states.put(round + 1, {a: state(a, round + 1) for a in taking_part})
            states.flush(round + 1)
        return seen

    def counted(seen, function):
        def call(*args, **kwargs):
            seen[function.__name__] += 1
            return function(*args, **kwargs)

        return call

    few, many = calls(50), calls(2000)
    assert few == many and few["open"] == 10 and not few["listdir"] + few["scandir"]
