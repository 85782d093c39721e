"""The job of `make bench` with a row per method: nufed against the same method as a PyTorch loop.

Both run whole rounds of the same agents on one core, the loops of plain.py, methods.py and
method_nets.py with the settings of nufed's algorithm.
"""

from functools import partial

import torch
from jobs import image_data, paper_module
from measure import interleaved, median, ratio
from method_nets import FedL2P, ScaleFL
from methods import (
    ANIL,
    APFL,
    MOON,
    Ditto,
    FedALA,
    FedBABU,
    FedBN,
    FedDBE,
    FedDyn,
    FedOpt,
    FedProto,
    FedProx,
    FedRep,
    FedRoD,
    LGFedAvg,
    PFedMe,
    PrivatePart,
    Reptile,
    Scaffold,
)
from plain import Loop, Meta, Samples
from torch import nn

from nufed import Objective
from nufed.algorithms import ALGORITHMS
from nufed.models import multi_exit
from nufed.server import Progress, initial_server
from nufed.simulation import Training
from nufed.simulation.choose_engine import Engines

LOOPS = {
    "fedavg": Loop,
    "per_fedavg": Meta,
    "gmeta": Meta,
    "anil": ANIL,
    "reptile": Reptile,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "fednova": Loop,  # where all agents take as many steps
    "moon": MOON,
    "feddbe": FedDBE,
    "fedproto": FedProto,
    "fedavgm": FedOpt,
    "fedadagrad": FedOpt,
    "fedadam": FedOpt,
    "fedyogi": FedOpt,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "apfl": APFL,
    "fedper": PrivatePart,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "lg_fedavg": LGFedAvg,
    "fedbn": FedBN,
    "fedala": FedALA,
    "fedrod": FedRoD,
    "knn_per": Loop,
    "fedl2p": FedL2P,
    "scalefl": ScaleFL,
}
SETTINGS = {
    "gmeta": {"adapt_steps": 3},  # as in the paper
    "fedala": {"first_passes": 1},  # a later round is measured
    "fedl2p": {"pretrain_rounds": 0},  # before that it is FedAvg
}
BEGIN, END = "<!-- begin: methods -->", "<!-- end: methods -->"  # of the table in the docs
VISITS = 60  # rounds of an agent in a usual training, over which the engine `auto` may prepare
START_UP = 3  # rounds before measuring: agents have states then, and FedALA mixes


def with_norms(inputs):
    """The paper's network with batch normalisation."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 80), nn.BatchNorm1d(80), nn.ReLU(),
        nn.Linear(80, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 10),
    )  # fmt: skip


def module_of(name, inputs):
    """The network that a method is measured on."""
    torch.manual_seed(0)
    if name == "fedbn":
        return with_norms(inputs)
    if name == "scalefl":
        return multi_exit((inputs,), 10, hidden=(80, 60))
    return paper_module(inputs)


def objective_of(module):
    stats = any(isinstance(layer, nn.BatchNorm1d) for layer in module.modules())
    return Objective(module, running_stats="tracked" if stats else "refuse")


class Rounds:
    """nufed as a contender: one whole round after another, all agents in each."""

    def __init__(self, algorithm, engine):
        self.algorithm, self.engine = algorithm, engine
        server = initial_server(algorithm, engine.objective, engine.objective.initial())
        self.progress = Progress(0, server)

    def round(self):
        self.progress = Training(self.algorithm, self.engine, 1.0).round(self.progress)


def contenders(name, data, sizes):
    """The PyTorch loop, nufed's engine that `auto` chooses, and the direct one."""
    algorithm = ALGORITHMS[name](batch_size=sizes.batch, **SETTINGS.get(name, {}))
    module = module_of(name, sizes.inputs)
    samples = Samples(data.samples.inputs, data.samples.targets, data.split.train, sizes.batch)
    loop = LOOPS[name](module, samples, algorithm)
    engines = Engines(objective_of(module), data, 0, VISITS)
    chosen = engines.choose(algorithm, "auto")
    found = {"PyTorch loop": partial(loop.round, data.split.seen)}
    for engine in dict.fromkeys(["direct", chosen]):
        found[engine] = Rounds(algorithm, engines.get(engine)).round
    return found, chosen


def markdown(result):
    """The rows as the table of docs/performance.md."""
    lines = [
        "| method | PyTorch loop | `direct` | `auto` | PyTorch loop / `auto` |",
        "|---|---|---|---|---|",
    ]
    for name, row in result.items():
        engine, times, found = row["engine"], row["times"], row["cpu ratio"]
        cells = [f"{1e3 * median(times[own], 'cpu'):.0f}" for own in ("PyTorch loop", "direct")]
        chosen = f"{1e3 * median(times[engine], 'cpu'):.0f} ({engine})"
        span = f"{found['median']:.2f} × ({found['from']:.2f} to {found['to']:.2f})"
        lines.append(f"| `{name}` | {' | '.join(cells)} | {chosen} | {span} |")
    return "\n".join(lines) + "\n"


def unmeasured():
    """The algorithms without a PyTorch loop, of which nothing is measured."""
    return sorted(set(ALGORITHMS) - set(LOOPS))


def write_table(result, path):
    """Replace the table in the page, which is between two comments."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{markdown(result)}{END}{after}")


def methods_job(sizes, names=None):
    """CPU-seconds and seconds of a round, and the ratio of the PyTorch loop's to nufed's."""
    data = image_data(sizes.cohort, sizes.samples, (sizes.inputs,))
    print(
        f"\nevery method on one core: {sizes.cohort} agents a round, the paper's network and data; "
        "CPU-ms, and times faster than the PyTorch loop (at least 1: not slower)"
    )
    print(f"  {'':12} {'plain':>7} {'direct':>7} {'auto':>7}  ratio")
    print("".join(f"  {name:12} unmeasured\n" for name in unmeasured()), end="")
    result = {}
    for name in names or LOOPS:
        works, engine = contenders(name, data, sizes)
        for _ in range(START_UP):
            for work in works.values():
                work()
        times = interleaved(works, sizes.method_repeats, warm_up=False)
        slow, fast = times["PyTorch loop"], times[engine]
        result[name] = row = {
            "engine": engine,
            "times": times,
            "cpu ratio": ratio(slow, fast, what="cpu"),
            "ratio": ratio(slow, fast),
            "direct cpu ratio": ratio(slow, times["direct"], what="cpu"),
        }
        cpu = {own: 1e3 * median(found, "cpu") for own, found in times.items()}
        found = row["cpu ratio"]
        word = "not slower" if found["median"] >= 1 else "SLOWER"
        print(
            f"  {name:12} {cpu['PyTorch loop']:7.1f} {cpu['direct']:7.1f} {cpu[engine]:7.1f}  "
            f"{found['median']:.2f} ({found['from']:.2f} to {found['to']:.2f}) {engine}: {word}"
        )
    slower = [name for name, row in result.items() if row["cpu ratio"]["median"] < 1]
    print(f"  slower than the PyTorch loop: {', '.join(slower) or 'none'}")
    return result
