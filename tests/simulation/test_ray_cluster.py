"""A cluster of Ray: the same bytes as one machine, also if a node is lost or the driver killed.

Ray itself is replaced by tests/simulation/fake_ray.py here; test_ray_nodes.py uses real nodes.
"""

import sys
from itertools import count
from types import SimpleNamespace

import pytest

import nufed
from lab.experiment.test_array_parts import CONFIG
from nufed import InputError
from nufed.errors import TrainingError
from nufed.lab.experiment import jobs as node_jobs
from nufed.lab.experiment.jobs import Changes, Tracked
from nufed.lab.experiment.session import Stop
from nufed.lab.experiment.setup import Setup
from nufed.simulation import RayCluster, ray_cluster
from simulation import fake_ray
from support import Killed, file_hashes, without_report

PARTS = {**CONFIG, "rounds": 3, "eval_every": 3}
AGENTS = {**PARTS, "seeds": [0], "methods": {"ditto": {"algorithm": "ditto"}}, "baselines": []}
pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture(autouse=True)
def ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", fake_ray)
    monkeypatch.setattr(ray_cluster, "ray_package", lambda: fake_ray)
    monkeypatch.setattr("nufed.simulation.ray_cluster.ray_package", lambda: fake_ray)
    monkeypatch.setattr(ray_cluster, "_losses", lambda: (fake_ray.ActorLostError,))
    yield fake_ray
    fake_ray.REFERENCES.clear()


@pytest.fixture(scope="module", params=["parts", "agents"])
def job(request, tmp_path_factory):
    """A configuration whose parts, or agents, go to the nodes, and its ordinary run."""
    path = tmp_path_factory.mktemp("whole") / "run"
    config = {"parts": PARTS, "agents": AGENTS}[request.param]
    with without_report():
        nufed.run(config, out=path)
    return request.param, config, path


def lose(monkeypatch, when):
    """Lose the actors whose task is one of these, counted from 1."""
    calls = 0
    before = ray_cluster.perform

    def perform(work, task, send):
        nonlocal calls
        calls += 1
        if calls not in when:
            return before(work, task, send)
        sent = 0

        def send_and_die(message):
            nonlocal sent
            sent += 1
            if sent == 4:
                raise fake_ray.Lost
            return send(message)

        before(work, task, send_and_die)
        raise fake_ray.Lost

    monkeypatch.setattr(ray_cluster, "perform", perform)


def test_nodes_leave_the_bytes_of_one_machine(job, tmp_path):
    _kind, config, whole = job
    seen = []
    nufed.run(config, out=tmp_path / "run", ray="auto", on_progress=seen.append)
    assert file_hashes(tmp_path / "run") == file_hashes(whole)
    parts = (len(config["methods"]) + bool(config["baselines"])) * len(config["seeds"])
    assert sum(event.starts for event in seen) == parts
    assert {event.round for event in seen} == {0, 1, 2, 3}


def test_agents_on_nodes_get_what_the_server_sends_them_alone(tmp_path):
    config = {**AGENTS, "methods": {"fedfomo": {"algorithm": "fedfomo", "models": 2}}}
    for name, ray in (("here", None), ("nodes", "auto")):
        nufed.run(config, out=tmp_path / name, ray=ray)
    assert file_hashes(tmp_path / "here") == file_hashes(tmp_path / "nodes")


def test_a_lost_nodes_work_is_done_again_elsewhere(job, tmp_path, monkeypatch, caplog):
    _kind, config, whole = job
    lose(monkeypatch, {2, 4})
    nufed.run(config, out=tmp_path / "run", ray="auto")
    assert caplog.text.count("was lost while working on") == 2
    assert file_hashes(tmp_path / "run") == file_hashes(whole)


def test_a_part_resumes_elsewhere_from_the_checkpoint_that_reached_the_driver(
    tmp_path, monkeypatch
):
    starts = []
    lose(monkeypatch, {1})
    nufed.run(
        PARTS,
        out=tmp_path / "run",
        ray="auto",
        on_progress=lambda event: starts.append(
            (event.method, event.seed, event.round, event.starts)
        ),
    )
    first = starts[0][:2]
    assert [round for *part, round, began in starts if tuple(part) == first and began] == [0, 1]


def test_a_task_that_costs_three_actors_is_named(tmp_path, monkeypatch):
    lose(monkeypatch, {1, 2, 3, 4, 5, 6, 7, 8, 9})
    with pytest.raises(TrainingError, match="3 actors of Ray were lost while working on"):
        nufed.run(PARTS, out=tmp_path / "run", ray="auto")


def fail_to_start(monkeypatch, kind, times):
    """The first actors of this kind do not start; the seconds that are waited for the next ones."""
    left, waited = [None] * times, []

    def failing(name):
        return name == kind and bool(left) and not left.pop()

    monkeypatch.setattr(fake_ray.Actor, "failing", staticmethod(failing))
    clock = SimpleNamespace(sleep=waited.append, monotonic=lambda: sum(waited))
    monkeypatch.setattr(ray_cluster, "time", clock)
    return waited


@pytest.mark.parametrize("actor", ["_Actor", "_Mailbox"])
def test_an_actor_that_is_placed_on_a_dying_node_starts_elsewhere(
    actor, job, tmp_path, monkeypatch, caplog
):
    kind, config, whole = job
    waited = fail_to_start(monkeypatch, actor, 5)
    alive = ({"here", "there", f"node {k}"} for k in count())  # one dies at each look

    def nodes():
        return [{"NodeID": name, "Alive": True} for name in next(alive)]

    monkeypatch.setattr(fake_ray, "nodes", nodes)
    nufed.run(config, out=tmp_path / "run", ray="auto")
    used = actor == "_Actor" or kind == "parts"
    assert caplog.text.count("was lost while it started") == (5 if used else 0)
    assert not waited and file_hashes(tmp_path / "run") == file_hashes(whole)


@pytest.mark.parametrize("actor", ["_Actor", "_Mailbox"])
def test_only_a_start_that_keeps_failing_on_living_nodes_is_an_error(actor, tmp_path, monkeypatch):
    fail_to_start(monkeypatch, actor, 2)
    nufed.run(PARTS, out=tmp_path / "run", ray="auto")
    waited = fail_to_start(monkeypatch, actor, 99)
    with pytest.raises(TrainingError, match=r"could not start in 3 attempts .*same version"):
        nufed.run(PARTS, out=tmp_path / "again", ray="auto")
    assert sum(waited) >= 20  # longer than Ray takes to call a node dead


def test_what_a_lost_mailbox_held_is_sent_again(tmp_path, monkeypatch, caplog):
    """A checkpoint reaches the mailbox, which is lost before the driver takes it."""
    nufed.run(PARTS, out=tmp_path / "whole")
    taken, lost = ray_cluster._Mailbox.take, []

    def take(self, stops):
        if len(lost) < 2 and self._messages:
            lost.append(self._messages)
            raise fake_ray.Lost
        return taken(self, stops)

    monkeypatch.setattr(ray_cluster._Mailbox, "take", take)
    nufed.run(PARTS, out=tmp_path / "run", ray="auto")
    assert any(changes for _, (kind, (_, _, changes)) in lost[0] if kind == "notification")
    assert "was lost while working on" in caplog.text
    assert file_hashes(tmp_path / "run") == file_hashes(tmp_path / "whole")


def test_an_actor_that_reaches_no_mailbox_is_a_loss_and_no_error(tmp_path, monkeypatch, caplog):
    nufed.run(PARTS, out=tmp_path / "whole")
    put, calls = ray_cluster._Mailbox.put, []

    def unreachable_once(self, key, message):
        calls.append(key)
        if len(calls) == 3:
            raise fake_ray.ActorLostError("unavailable")
        return put(self, key, message)

    monkeypatch.setattr(ray_cluster._Mailbox, "put", unreachable_once)
    nufed.run(PARTS, out=tmp_path / "run", ray="auto")
    assert caplog.text.count("was lost while working on") == 1
    assert file_hashes(tmp_path / "run") == file_hashes(tmp_path / "whole")


def test_idle_actors_of_a_lost_node_cost_no_task_its_attempts(tmp_path, monkeypatch):
    """More idle actors than a task may cost are lost at once."""
    monkeypatch.setattr(fake_ray, "cluster_resources", lambda: {"CPU": 6.0})
    cluster = RayCluster("auto")
    pool = cluster.workers(lambda task, notify: task)
    assert pool.map(range(6), lambda *_: "a task") == [*range(6)]
    while cluster.starting:
        cluster.actor_started(next(iter(cluster.starting)))
    for actor in cluster.idle[:5]:
        fake_ray.kill(actor)
    cluster.idle.reverse()  # the lost ones would be used first
    assert pool.map(["one"], lambda *_: "a task") == ["one"]


def test_a_killed_driver_is_resumed_with_or_without_a_cluster(job, tmp_path):
    _kind, config, whole = job

    def kill(event):
        if event.round == 2:
            raise Killed

    for name, address in (("on", "auto"), ("off", None)):
        with pytest.raises(Killed):
            nufed.run(config, out=tmp_path / name, ray="auto", on_progress=kill)
        seen = []
        nufed.resume(tmp_path / name, ray=address, on_progress=seen.append)
        assert any(event.starts and event.round for event in seen)  # not from the beginning
        assert file_hashes(tmp_path / name) == file_hashes(whole)


def test_a_signal_stops_parts_at_their_next_round(tmp_path, monkeypatch):
    told = []

    class Signalled(Stop):
        def __call__(self):
            return len(told) > 2

    def put(self, key, message):
        told.append(message)
        return before(self, key, message) or len(told) > 2

    before = ray_cluster._Mailbox.put
    monkeypatch.setattr(ray_cluster._Mailbox, "put", put)
    monkeypatch.setattr("nufed.lab.experiment.session.Stop", Signalled)
    with pytest.raises(KeyboardInterrupt):
        nufed.run({**PARTS, "baselines": []}, out=tmp_path / "run", ray="auto")
    saved = list((tmp_path / "run").rglob("checkpoint-*"))
    assert saved and not list((tmp_path / "run").rglob("done.json"))


def test_errors_of_a_node_are_raised_here(tmp_path):
    bad = {**PARTS, "method": {**PARTS["method"], "meta_lr": 1e9}, "baselines": []}
    with pytest.raises(TrainingError, match="no method could be trained"):
        nufed.run(bad, out=tmp_path / "run", ray="auto")
    assert list((tmp_path / "run").rglob("failure.json"))


def test_a_cluster_that_is_missing_is_one_sentence(monkeypatch):
    monkeypatch.setattr(fake_ray, "cluster_resources", lambda: {"CPU": 1.0})
    with pytest.raises(InputError, match="its nodes have fewer than 2 cores"):
        RayCluster("auto", threads=2)
    monkeypatch.setattr(fake_ray, "cluster_resources", lambda: 1 / 0)
    with pytest.raises(InputError, match=r"--ray there:1: no cluster of Ray could be reached"):
        RayCluster("there:1")
    on_a_gpu = SimpleNamespace(config=SimpleNamespace(device="cuda"))
    with pytest.raises(InputError, match=r"--ray auto: device = 'cuda', and must be 'cpu'"):
        Setup.on_ray(on_a_gpu, "auto")


def test_changes_are_written_in_an_order_that_a_kill_may_interrupt(tmp_path, monkeypatch):
    there, here, order = tmp_path / "there", tmp_path / "here", []
    (there / "states/000001").mkdir(parents=True)
    tracked = Tracked(there)
    for name in ("done.json", "checkpoint-000001.safetensors", "metrics.jsonl", ".a.tmp"):
        (there / name).write_text(name)
    (there / "states/000001/7.safetensors").write_text("state")
    changes = tracked.changes()
    write = node_jobs.write_durably
    monkeypatch.setattr(
        node_jobs, "write_durably", lambda p, c: (order.append(p.name), write(p, c))
    )
    changes.apply(here)
    assert order[-2:] == ["checkpoint-000001.safetensors", "done.json"] and len(order) == 4
    (there / "states/000001/7.safetensors").unlink()
    (there / "metrics.jsonl").write_text("longer than before")
    again = tracked.changes()
    assert again == Changes(
        {"metrics.jsonl": b"longer than before"}, ["states/000001/7.safetensors"]
    )
    again.apply(here)
    assert not (here / "states/000001").exists() and not tracked.changes().written


def test_a_sweep_and_a_search_on_nodes_leave_the_bytes_of_one_machine(tmp_path):
    small = {**PARTS, "rounds": 2, "eval_every": 2, "seeds": [0], "baselines": []}
    small["data"] = {**PARTS["data"], "validation": 0.25}
    for where in (None, "auto"):
        out = tmp_path / f"sweep-{where}"
        nufed.sweep(small, {"method.meta_lr": [0.1, 0.2]}, out=out, ray=where, figures=False)
        out = tmp_path / f"tune-{where}"
        nufed.tune(small, budget=3, out=out, ray=where, figures=False)
    for kind in ("sweep", "tune"):
        alone, spread = (file_hashes(tmp_path / f"{kind}-{where}") for where in (None, "auto"))
        assert alone == spread and len(alone) > 10
