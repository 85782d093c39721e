"""TensorBoard, MLflow and W&B: their own packages read back what was written, offline."""

import json
import socket
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import nufed
from nufed.errors import InputError
from nufed.lab.export import MLflow, TensorBoard, export
from nufed.lab.export.target import needed
from support import Killed, without_report

CONFIG = {
    "name": "tracked",
    "rounds": 6,
    "participation": 0.5,
    "eval_every": 2,
    "checkpoint_every": 2,
    "baselines": [],
    "workers": 1,
    "data": {"agents": 6, "samples_per_agent": 20, "dirichlet": 1.0, "unseen_agents": 1},
    "model": {"args": {"hidden": [6]}},
    "method": {"adapt_steps": 1, "adapt_lr": 0.05, "meta_lr": 0.3, "batch_size": 5},
    "methods": {"gmeta": {}, "fedper": {}},
}


class Kill(nufed.Observer):
    def round(self, event):
        if (event.method, event.round) == ("fedper", 5):
            raise Killed


def refuse_network(patch):
    """Refuse connections to other machines, and list them."""
    tried, connect = [], socket.socket.connect

    def guarded(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            tried.append(address)
            raise OSError("no network here")
        return connect(self, address)

    patch.setattr(socket.socket, "connect", guarded)
    return tried


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run with observers, killed in the middle and resumed with new ones."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch, without_report():
        tried = refuse_network(patch)
        observers = [TensorBoard(), MLflow(folder / "ml")]
        with pytest.raises(Killed):
            nufed.run(CONFIG, out=folder / "run", observers=[*observers, Kill()])
        observers = [TensorBoard(), MLflow(folder / "ml")]
        run = nufed.resume(folder / "run", observers=observers)
    assert tried == []
    return run, folder


def expected(run, method):
    """Every curve as (step, value) pairs, from the run's metrics."""
    lines, steps = run.methods[method][0].metrics, run.config.steps_of(method)[0]
    evaluated = [line for line in lines if line.evaluation]
    return {
        "training/update_norm": [(m.round, m.update_norm) for m in lines[1:]],
        "training/loss": [(m.round, m.training_loss) for m in evaluated],
        "seen/personal": [(m.round, m.evaluation["seen"].score[steps]) for m in evaluated],
        "unseen/personal": [(m.round, m.evaluation["unseen"].score[steps]) for m in evaluated],
    }


def read_events(folder):
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def same_curves(found, run, method):
    for name, curve in expected(run, method).items():
        assert [step for step, _ in found[name]] == [step for step, _ in curve], name
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in curve], rel=1e-6), name
    assert ("seen/global" in found) == (method == "gmeta")


@pytest.mark.parametrize("method", ["gmeta", "fedper"])
def test_tensorboard_shows_continued_curves(tracked, tmp_path, method):
    run, _ = tracked
    found = read_events(run.path / "tensorboard" / method / "seed-0")
    same_curves(found, run, method)
    assert len(list((run.path / "tensorboard" / method / "seed-0").iterdir())) == 2
    steps = run.config.steps_of(method)[0]
    final = [s.score[steps] for s in run.methods[method][0].final if s.seen]
    ((_, value),) = found["final/seen/personal"]
    assert value == pytest.approx(sum(final) / len(final))
    for _ in range(2):  # exporting again replaces the curves
        export(run, "tensorboard", tmp_path)
        same_curves(read_events(tmp_path / method / "seed-0"), run, method)


def read_mlflow(store):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store.as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "tracked"]
    found = {}
    for own in client.search_runs([experiment.experiment_id]):
        curves = {
            name: [(m.step, m.value) for m in client.get_metric_history(own.info.run_id, name)]
            for name in own.data.metrics
        }
        assert own.data.tags["nufed.method"] not in found
        found[own.data.tags["nufed.method"]] = own, curves
    return found


def test_mlflow_reads_back_a_resumed_run_and_an_exported_one(tracked, monkeypatch):
    run, folder = tracked
    tried = refuse_network(monkeypatch)
    for _ in range(2):  # again: nothing is written twice
        export(run, "mlflow", folder / "exported")
    for store in ("ml", "exported"):
        found = read_mlflow(folder / store)
        assert found.keys() == {"gmeta", "fedper"}
        for method, (own, curves) in found.items():
            same_curves(curves, run, method)
            assert own.info.status == "FINISHED" and len(curves["final/seen/personal"]) == 1
        assert found["gmeta"][0].data.params["method.adapt_lr"] == "0.05"
        assert found["gmeta"][0].data.params["data.agents"] == "6"
    assert tried == []


def wandb_records(path):
    """The records of a W&B file: W&B's header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, pieces = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        pieces += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a full record, or the last piece of one
            record = Record()
            record.ParseFromString(pieces)
            yield record
            pieces = b""


def test_wandb_files_hold_the_curves(tracked, tmp_path, monkeypatch, nufed):
    run, _ = tracked
    tried = refuse_network(monkeypatch)
    result = nufed("export", run.path, "--to", "wandb", cwd=tmp_path)
    assert result.returncode == 0 and "wandb sync" in result.stdout, result.stderr
    import wandb

    wandb.teardown()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    for file in files:
        records = list(wandb_records(file))
        (about,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        found = {}
        for record in records:
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            for name, value in items.items():
                point = int(items["_step"]), json.loads(value)
                found.setdefault(name, []).append(point)
        method = about.display_name.split()[0]
        assert about.project == "tracked"
        same_curves(found, run, method)
    assert tried == []


def test_the_guard_notices_a_connection(monkeypatch):
    tried = refuse_network(monkeypatch)
    with pytest.raises(OSError, match="no network"), socket.socket() as open_socket:
        open_socket.connect(("192.0.2.1", 80))
    assert tried == [("192.0.2.1", 80)]


def test_bad_requests_are_one_sentence(tracked, tmp_path, nufed):
    run, _ = tracked
    for wrong, said in (
        (["--to", "tensorbord"], "did you mean 'tensorboard'?"),
        (["--to", "mlflow", "--seed", "0"], "leave out --method and --seed"),
    ):
        result = nufed("export", run.path, *wrong, cwd=tmp_path)
        assert result.returncode == 2 and said in result.stderr
    with pytest.raises(InputError, match=r'pip install "nufed\[mlflow\]"'), needed("it", "mlflow"):
        raise ImportError("No module named 'mlflow'")
