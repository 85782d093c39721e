"""Worker processes: the same bits for any number of them, and no orphans after any failure."""

import os
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import nufed
from lab.experiment.test_runner import SMALL
from nufed import Exact, FirstOrder, GMeta, HessianFree, NumericalWarning, Objective
from nufed.algorithms import Scaffold
from nufed.algorithms.protocol import AgentResult, Cost
from nufed.errors import NufedError, TrainingError, UpdateError
from nufed.evaluate import Measure
from nufed.lab.files import read_sealed
from nufed.models import fcnn
from nufed.objective.fast.gram_space import FirstLayer, first_layer
from nufed.objective.fast.onednn import OneDNNFirstLayer, closed_form, with_onednn
from nufed.server import to_send
from nufed.simulation import (
    BatchedEngine,
    DirectEngine,
    GramEngine,
    WorkerEngine,
    start_method,
    train,
)
from processes import NUFED, alive, children, descendants, wait_for
from support import context, file_hashes, states_of, uneven_federation

pytestmark = pytest.mark.skipif(start_method() != "fork", reason="this system can't fork safely")

ALGORITHM = GMeta(
    adapt_steps=2, adapt_lr=0.2, meta_lr=0.3, local_steps=2, batch_size=12, curvature=Exact()
)
KINDS = ("direct", "direct_onednn", "closed_form", "batched", "gram", "gram_onednn")
TESTS = Path(__file__).parents[1]


def make(kind, loss=F.cross_entropy, activation="tanh"):
    torch.manual_seed(0)
    objective = Objective(fcnn((5,), 3, hidden=(6,), activation=activation), loss)
    data = uneven_federation()
    if kind.startswith("direct"):
        return DirectEngine(with_onednn(objective) if kind != "direct" else objective, data, 5)
    if kind == "closed_form":
        return DirectEngine(closed_form(objective), data, 5)
    if kind == "batched":
        return BatchedEngine(objective, data, 5, most=2)
    layer = FirstLayer if kind == "gram" else OneDNNFirstLayer
    return GramEngine(objective, data, 5, first_layer(objective, (5,), layer), most=2)


@pytest.fixture
def spread():
    """Makes worker engines, closes them, and checks that no process is left."""
    before, made = children(os.getpid()), []

    def start(engine, workers):
        made.append(WorkerEngine(engine, workers))
        return made[-1]

    yield start
    for engine in made:
        engine.close()
    assert children(os.getpid()) == before


SCAFFOLD = Scaffold(meta_lr=0.1, local_steps=2, batch_size=6)


def everything(algorithm, engine):
    """All results of training and evaluation, as bits."""
    w = engine.objective.initial()
    history = list(train(algorithm, engine, w, rounds=3, participation=0.8))
    last = history[-1]
    states = states_of(engine, last)
    received = to_send(algorithm, last.server)
    scores = engine.evaluate(algorithm, received, states, steps=2, measure=Measure("accuracy"))
    servers = [numbers(progress.server) for progress in history]
    kept = {agent: numbers(last.states.get(agent)) for agent in last.states.agents()}
    return servers, kept, [progress.cost for progress in history], scores


def numbers(state):
    return {name: vector.tolist() for name, vector in state.items()}


def update(engine, round=1, algorithm=ALGORITHM):
    received = {"model": engine.objective.initial()}
    states = {agent: {} for agent in engine.federation.split.agents}
    return engine.agent_updates(algorithm, received, states, context(round))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_gives_the_bits_of_the_engine_alone(
    kind, workers, spread, monkeypatch
):
    monkeypatch.setattr("nufed.objective.fast.onednn.LARGE", 1)
    alone = everything(ALGORITHM, make(kind))
    assert everything(ALGORITHM, spread(make(kind), workers)) == alone


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_agents_states_are_exchanged_too(workers, spread):
    alone = everything(SCAFFOLD, make("direct"))
    assert everything(SCAFFOLD, spread(make("direct"), workers)) == alone
    assert len(alone[1]) == 5


def test_the_work_is_done_in_other_processes(spread, tmp_path):
    def telling(outputs, targets):
        (tmp_path / str(os.getpid())).touch()
        return F.cross_entropy(outputs, targets)

    update(spread(make("direct", telling), 2))
    pids = {int(path.name) for path in tmp_path.iterdir()}
    assert os.getpid() not in pids and len(pids) == 2


@dataclass(frozen=True)
class Growing(Scaffold):
    """Agents keep nothing at first and then two vectors, and send one that they don't receive."""

    receives = ("model",)
    sends = ("model", "step")

    def agent_update(self, context, received, state):
        w = received["model"]
        (batch,) = context.batches.draw("outer", self.batch_size)
        step = -self.meta_lr * context.objective.grad(w, batch)
        kept = {"rounds": state.get("rounds", torch.zeros(1)) + 1, "step": step}
        return AgentResult({"model": w + step, "step": step}, kept, Cost(1))


def test_vectors_that_do_not_fit_into_the_buffer_arrive(spread):
    outcomes = []
    for engine in (make("direct"), spread(make("direct"), 2)):
        states = {agent: {} for agent in engine.federation.split.agents}
        for round in (1, 2):
            received = {"model": engine.objective.initial()}
            results = engine.agent_updates(
                Growing(meta_lr=0.1, batch_size=6), received, states, context(round)
            )
            states = {agent: result.state for agent, result in results.items()}
        outcomes.append(
            {a: (numbers(r.vectors), numbers(r.state), r.cost) for a, r in results.items()}
        )
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2][1]["rounds"] == [2.0]


def test_one_engine_serves_several_algorithms_and_measures(spread):
    engine, alone = spread(make("direct"), 2), make("direct")
    other = GMeta(
        adapt_steps=1,
        adapt_lr=0.1,
        meta_lr=0.1,
        local_steps=1,
        batch_size=5,
        curvature=FirstOrder(),
    )

    def worst(outputs, targets):
        return -float(outputs.abs().max())

    for algorithm, metric in ((ALGORITHM, worst), (other, worst), (ALGORITHM, None)):
        results = [update(e, 1, algorithm) for e in (engine, alone)]
        left, right = ({a: numbers(r.vectors) for a, r in each.items()} for each in results)
        assert left == right
        server, states = {"model": alone.objective.initial()}, {3: {}, 1: {}}
        left, right = (
            e.evaluate(algorithm, server, states, steps=2, measure=Measure("own", metric))
            for e in (engine, alone)
        )
        assert left == right and [s.agent for s in left] == [3, 1]


def test_processes_are_reused_from_round_to_round(spread):
    engine = spread(make("direct"), 2)
    before = children(os.getpid())
    update(engine, 1)
    first = children(os.getpid()) - before
    update(engine, 2)
    assert children(os.getpid()) - before == first and len(first) == 2
    engine.close()
    assert children(os.getpid()) == before
    update(engine, 3)  # a closed engine can be used again


def test_results_of_a_round_are_not_overwritten_by_the_next(spread):
    engine = spread(make("direct"), 2)
    first = update(engine, 1)
    before = {agent: numbers(result.vectors) for agent, result in first.items()}
    assert numbers(update(engine, 2)[0].vectors) != before[0]
    assert {agent: numbers(result.vectors) for agent, result in first.items()} == before


def small_batches(then, outputs, targets, parent):
    """A loss that does something for agents 0 and 4, whose batches have 9 samples."""
    if len(targets) == 9 and os.getpid() != parent:
        then()
    return F.cross_entropy(outputs, targets)


def loss_that(then, parent=None):
    parent = os.getpid() if parent is None else parent
    return lambda outputs, targets: small_batches(then, outputs, targets, parent)


def spoil():
    raise ValueError("odd sample")


@pytest.mark.parametrize(
    ("kind", "who"), [("direct", "agent [04]"), ("batched", "one of agents 0, 4")]
)
def test_an_error_names_agent_and_round_and_leaves_a_usable_engine(kind, who, spread):
    engine = spread(make(kind, loss_that(spoil)), 2)
    with pytest.raises(TrainingError, match=rf"^{who} failed in round 7: ValueError: odd sample$"):
        update(engine, round=7)
    received = {"model": engine.objective.initial()}
    again = engine.agent_updates(ALGORITHM, received, {2: {}, 3: {}}, context(8))
    alone = make(kind).agent_updates(ALGORITHM, received, {2: {}, 3: {}}, context(8))
    for agent in (2, 3):
        torch.testing.assert_close(again[agent].vectors["model"], alone[agent].vectors["model"])


def test_an_error_in_evaluation_names_the_agent(spread):
    engine = spread(make("direct", loss_that(spoil)), 2)
    server = {"model": engine.objective.initial()}
    states = {agent: {} for agent in (1, 4)}
    with pytest.raises(TrainingError, match=r"^agent 4 failed in evaluation: ValueError: odd"):
        engine.evaluate(ALGORITHM, server, states, steps=1, measure=Measure("accuracy"))


@pytest.mark.parametrize(("kind", "who"), [("direct", "[04]"), ("batched", "0, 4")])
def test_a_killed_worker_is_reported_with_its_agents_and_no_process_is_left(kind, who, spread):
    before = children(os.getpid())
    suicide = loss_that(lambda: os.kill(os.getpid(), signal.SIGKILL))
    engine = spread(make(kind, suicide), 2)
    with pytest.raises(TrainingError, match=rf"SIGKILL.*while working on agents {who} in round 7$"):
        update(engine, round=7)
    assert children(os.getpid()) == before
    received = {"model": engine.objective.initial()}
    assert engine.agent_updates(ALGORITHM, received, {2: {}}, context(8)).keys() == {2}


def test_a_worker_killed_between_rounds_is_reported_too(spread):
    engine = spread(make("direct"), 1)
    before = children(os.getpid())
    update(engine)
    (worker,) = children(os.getpid()) - before
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not alive({worker}))
    with pytest.raises(TrainingError, match=r"SIGKILL.*while working on agents 0 in round 2$"):
        update(engine, round=2)
    assert len(update(engine, round=2)) == 6


def test_a_worker_that_exits_is_reported_with_its_code(spread):
    engine = spread(make("direct", loss_that(lambda: os._exit(3))), 1)
    with pytest.raises(TrainingError, match=r"ended with exit code 3 while working on agents 0 in"):
        update(engine)


def test_warnings_of_workers_reach_the_parent(spread):
    loss = loss_that(lambda: warnings.warn("small batch", stacklevel=2))
    with pytest.warns(UserWarning, match="^small batch$"):
        update(spread(make("direct", loss), 2))
    for engine in (make("direct"), spread(make("direct"), 2)):
        with pytest.warns(NumericalWarning, match="fd_step = 1000 gives"):
            update(
                engine,
                1,
                GMeta(
                    adapt_steps=2,
                    adapt_lr=0.2,
                    meta_lr=0.3,
                    local_steps=2,
                    batch_size=12,
                    curvature=HessianFree(1e3),
                ),
            )


def test_exceptions_that_cannot_be_serialised_are_reported(spread):
    class Local(UserWarning):
        pass

    def fail():
        raise UpdateError(4, 1, "odd sample")  # is made of three arguments, not of its message

    loss = loss_that(lambda: warnings.warn(Local("small batch"), stacklevel=2))
    with pytest.warns(UserWarning, match="^small batch$"):
        update(spread(make("direct", loss), 2))
    with pytest.raises(NufedError, match=r"^agent 4, round 1: odd sample$"):
        update(spread(make("direct", loss_that(fail)), 2))


SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(TESTS)!r})
import torch
import torch.nn.functional as F
from nufed import (GMeta, Objective)
from nufed.simulation import (DirectEngine, WorkerEngine)
from support import context, mlp, uneven_federation

def slow(outputs, targets):
    time.sleep(float(sys.argv[1]))
    return F.cross_entropy(outputs, targets)

torch.set_num_threads(1)
objective = Objective(mlp(), slow)
engine = WorkerEngine(DirectEngine(objective, uneven_federation(), 5), 3)
states = {{agent: {{}} for agent in range(6)}}
engine.agent_updates(GMeta(batch_size=12), {{"model": objective.initial()}}, states, context())
print("done", flush=True)
"""


def test_an_engine_that_is_never_closed_does_not_delay_exit():
    command = [sys.executable, "-c", SCRIPT, "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("seconds", ["0.03", "0"], ids=["at work", "idle"])
def test_a_killed_parent_leaves_no_orphans(seconds):
    script = SCRIPT + "time.sleep(60)\n"
    with subprocess.Popen(
        [sys.executable, "-c", script, seconds], stdout=subprocess.PIPE
    ) as parent:
        if seconds == "0":
            parent.stdout.readline()
        wait_for(lambda: len(children(parent.pid)) == 3)
        workers = children(parent.pid)
        parent.kill()
    wait_for(lambda: not alive(workers))


NESTED = """
rounds = 5000
eval_every = 5000
[data]
agents = 12
samples_per_agent = 40
test = 0.25
[method]
batch_size = 10
"""


@pytest.mark.parametrize(("config", "processes"), [("quickstart", 3), ("nested.toml", 2 + 4)])
def test_ctrl_c_ends_everything(config, processes, tmp_path):
    (tmp_path / "nested.toml").write_text(NESTED)
    workers = 3 if config == "quickstart" else 4
    command = [*NUFED, "run", config, f"workers={workers}"]
    command += ["rounds=5000"]
    with subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as parent:
        wait_for(lambda: len(descendants(parent.pid)) >= processes)
        below = descendants(parent.pid)
        os.killpg(parent.pid, signal.SIGINT)
        _, told = parent.communicate()
    assert parent.returncode == 130 and "Traceback" not in told
    wait_for(lambda: not alive(below))


def files(path):
    """The files of a run, without its number of workers."""
    config = (path / "config.toml").read_text().splitlines()
    kept = [line for line in config if not line.startswith("workers = ")]
    assert len(kept) == len(config) - 1
    return {**file_hashes(path), "config.toml": kept}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return nufed.run(SMALL, ["workers=1"], out=tmp_path_factory.mktemp("runs") / "one")


@pytest.mark.parametrize("workers", [2, 3])
def test_a_run_leaves_the_same_bytes_with_any_number_of_workers(workers, one_process, tmp_path):
    before = children(os.getpid())
    events = []
    run = nufed.run(SMALL, [f"workers={workers}"], out=tmp_path / "run", on_progress=events.append)
    assert files(run.path) == files(one_process.path)
    assert children(os.getpid()) == before
    told = [(e.seed, e.method, e.round) for e in events if e.method == "exact"]
    assert sorted(set(told)) == [(s, "exact", k) for s in (0, 1) for k in range(5)]


def test_workers_of_workers_leave_the_same_bytes(tmp_path):
    config = {**SMALL, "seeds": [0], "methods": {"exact": {"algorithm": "gmeta"}}, "engine": "gram"}
    runs = [nufed.run(config, [f"workers={n}"], out=tmp_path / str(n)) for n in (1, 5)]
    assert files(runs[0].path) == files(runs[1].path)


def test_a_method_that_fails_in_a_worker_is_recorded_and_the_others_continue(tmp_path):
    overrides = ["methods.exact.meta_lr=1e30", "workers=2"]
    run = nufed.run(SMALL, overrides, out=tmp_path / "run")
    assert set(run.methods) == {"fedavg", "hf"}
    for seed in (0, 1):
        part = run.path / "methods" / "exact" / f"seed-{seed}"
        assert "not finite" in read_sealed(part / "failure.json").about["reason"]


def test_a_part_whose_process_is_killed_is_named(tmp_path):
    parent = os.getpid()

    def loss(outputs, targets):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(outputs, targets)

    before = children(parent)
    with pytest.raises(TrainingError, match=r"SIGKILL.*at .* with seed [01], after round 0$"):
        nufed.run(SMALL, ["workers=2"], loss=loss, out=tmp_path / "run")
    assert children(parent) == before


FEW_FILES = """
import resource, sys
from nufed.lab.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
main()
"""


def test_too_few_open_files_for_the_workers_end_in_one_sentence_and_leave_no_process(tmp_path):
    overrides = ["rounds=1", "seeds=[0]", "data.agents=4", "data.unseen_agents=0"]
    command = [sys.executable, "-c", FEW_FILES, "run", "quickstart", *overrides]
    result = subprocess.run(
        [*command, "workers=8", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    *_, last = result.stderr.splitlines()
    assert "worker processes can't be started (Too many open files)" in last
    assert "ulimit -n" in last and "workers=1" in last and "Traceback" not in result.stderr
    assert (tmp_path / "run/run.json").exists()  # which --resume needs
