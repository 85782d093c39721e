"""MAML's fully connected Omniglot, 5-way 1-shot (Finn et al. 2017), trained with nufed.

    python benchmarks/external_maml.py --rounds 60000

Every agent is a task: five characters, each turned by a random multiple of 90°, and two drawings of
each. MAML's meta-batch is the cohort of a round. As in the authors' code there are 200,000 tasks to
train on, and 600 to score, of characters that no training agent has. GMeta with ν = 1, one local
update of size 1, one batch for the inner step and its Hessian, and FedAdam at the server is MAML
with Adam. Adds to docs/results/external.json and writes the page; the same command with more rounds
resumes. A round takes about 0.05 seconds of a core.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from external_page import PAGE, RESULTS, write
from safetensors.torch import load_file, save_file
from torch import nn

from nufed import Federation, Objective, Samples, gmeta
from nufed.algorithms.server_optimizer import Adam
from nufed.data.federation import AgentBatches
from nufed.data.split import Split
from nufed.errors import NufedError
from nufed.evaluate import Measure, nearest_centroid
from nufed.lab.config.devices import torch_threads
from nufed.lab.readers.sources import data_directory
from nufed.objective.fast.gram_space import first_layer
from nufed.seeding import stream
from nufed.server import Progress
from nufed.simulation import GramEngine, train

RUNS = Path("runs/external")
WAYS, TASKS, NEWCOMERS, COHORT = 5, 200_000, 600, 32  # as in the code of the authors
TRAINING, VALIDATION = 1100, 100  # characters, as in the authors' code; 423 are left to test
HIDDEN, INNER_LR, META_LR, STEPS = (256, 128, 64, 64), 0.4, 0.001, 3
EVERY = 500  # rounds between two scores


def lanczos(before: int = 105, after: int = 28) -> torch.Tensor:
    """The matrix that resizes a row of pixels with a Lanczos filter of 3 lobes."""
    ratio = before / after
    centre = (torch.arange(after, dtype=torch.float64)[:, None] + 0.5) * ratio
    x = (torch.arange(before, dtype=torch.float64) + 0.5 - centre) / ratio
    weights = torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)
    return (weights / weights.sum(1, keepdim=True)).float()


def drawings() -> torch.Tensor:
    """All characters as bytes: character, drawing, rotation, 28, 28."""
    with np.load(data_directory() / "omniglot.npz") as archive:
        order = np.lexsort((archive["drawer"], archive["character"], archive["alphabet"]))
        ink = np.unpackbits(archive["ink"][order], axis=1, count=105 * 105)
    small, resize = [], lanczos()
    for part in np.array_split(ink, 40):
        images = torch.from_numpy(part).view(-1, 105, 105).float()
        small.append((resize @ images @ resize.T).clamp_(0, 1).mul_(255).round_().byte())
    images = torch.cat(small).view(-1, 20, 28, 28)
    return torch.stack([torch.rot90(images, k, (2, 3)) for k in range(4)], dim=2)


@dataclass(frozen=True)
class OneOfEachClass(AgentBatches):
    """Inner and outer batches with one drawing of each character: two of each stand together."""

    def _half(self, pool, step):
        rng = stream(self.seed, f"{self.use}/halves", self.round, self.agent, step)
        first = rng.integers(2, size=self.samples // 2)
        return 2 * np.arange(self.samples // 2) + (first if pool == "support" else 1 - first)


class Tasks(Federation):
    def batches(self, agent, seed, use, round=0):
        return OneOfEachClass(self, agent, seed, use, round)


def tasks(images: torch.Tensor, number: int, newcomers: int, cut: int, seed: int) -> Tasks:
    """Tasks of the first ``cut`` characters, in a random order, and newcomers of the last ones."""
    characters, each, rotations = images.shape[:3]
    known, order = each * rotations, stream(seed, "characters").permutation(characters)
    rng = stream(seed, "tasks")

    def drawn(among, tasks):
        """Rows, by task and character two of them; a row is a drawing under one of the labels."""
        chosen = among[rng.random((tasks, len(among))).argpartition(WAYS, 1)[:, :WAYS]]
        turned = rng.integers(rotations, size=chosen.shape)[..., None]
        two = rng.random((*chosen.shape, each)).argpartition(2, -1)[..., :2]
        inputs = chosen[..., None] * known + two * rotations + turned
        return inputs + np.arange(WAYS)[:, None] * characters * known

    seen = [drawn(order[:cut], min(1000, number - i)) for i in range(0, number, 1000)]
    train = list(np.concatenate(seen).reshape(number, -1))
    later = drawn(order[cut + VALIDATION :], newcomers)
    nobody = np.empty(0, dtype=np.int64)
    split = Split(
        train + list(later[:, :, 0]),
        [nobody] * (number + newcomers),
        [nobody] * number + list(later[:, :, 1]),
        range(number + newcomers),
        tuple(range(number, number + newcomers)),
    )
    samples = Samples(
        images.flatten(0, 2).repeat(WAYS, 1, 1),
        torch.arange(WAYS).repeat_interleave(characters * known),
        classes=tuple(map(str, range(WAYS))),
        scale=1 / 255,
    )
    return Tasks(samples, split)


def network(inputs: int = 28 * 28, hidden=HIDDEN) -> nn.Module:
    """Linear layers, each but the last followed by BatchNorm, always of the batch, and ReLU."""
    layers, wide = [nn.Flatten()], inputs
    for narrow in hidden:
        norm = nn.BatchNorm1d(narrow, eps=1e-3, track_running_stats=False)
        layers, wide = [*layers, nn.Linear(wide, narrow), norm, nn.ReLU()], narrow
    net = nn.Sequential(*layers, nn.Linear(wide, WAYS))
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.01, a=-0.02, b=0.02)
            nn.init.zeros_(layer.bias)
    return net


def method():
    adam = Adam(
        optimizer_lr=META_LR, optimizer_momentum=0.9, optimizer_beta2=0.999, optimizer_tau=1e-8
    )
    return gmeta(
        adapt_steps=1,
        adapt_lr=INNER_LR,
        meta_lr=1.0,
        local_steps=1,
        batch_size=WAYS,
        outer_samples="disjoint",
        inner_batches="one",
        server_optimizer=adam,
    )


def scored(engine, server, agents) -> list[dict[str, float]]:
    """Mean accuracy of newcomers, and the half width of its 95 % interval, by steps."""
    scores = engine.evaluate(
        method(), server, dict.fromkeys(agents), steps=STEPS, measure=Measure("accuracy")
    )
    by_step = np.array([each.score for each in scores])
    half = 1.96 * by_step.std(0) / len(by_step) ** 0.5
    return [
        {"mean": round(float(m), 5), "half": round(float(h), 5)}
        for m, h in zip(by_step.mean(0), half, strict=True)
    ]


def trained(federation: Tasks, objective: Objective, rounds: int, seed: int, folder: Path, every):
    """The curve of scores by round, resumed from the folder."""
    algorithm, split = method(), federation.split
    layer = first_layer(objective, federation.samples.input_shape)
    engine = GramEngine(objective, federation, seed, layer, most=COHORT)
    state, curve_file = folder / "server.safetensors", folder / "curve.json"
    curve = json.loads(curve_file.read_text("utf-8")) if curve_file.exists() else []
    start = Progress(curve[-1]["round"], load_file(state)) if curve else None
    participation = COHORT / len(split.seen)
    began = time.process_time()
    for progress in train(
        algorithm,
        engine,
        objective.initial(),
        rounds=rounds,
        participation=participation,
        start=start,
    ):
        k = progress.round
        if k and (k % every == 0 or k == rounds) and (not curve or k > curve[-1]["round"]):
            accuracy = scored(engine, progress.server, split.unseen)
            seconds = time.process_time() - began + (curve[-1]["seconds"] if curve else 0)
            began = time.process_time()
            curve.append({"round": k, "accuracy": accuracy, "seconds": round(seconds, 1)})
            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(progress.server), state)
            curve_file.write_text(json.dumps(curve, indent=1) + "\n", "utf-8")
            print(f"round {k}: {accuracy[-1]['mean']:.1%} after {STEPS} steps", flush=True)
    return curve


def centroid(federation: Tasks) -> float:
    """Newcomers' accuracy of the nearest drawing, which needs no training."""
    scores = [nearest_centroid(federation, agent, 0).score[0] for agent in federation.split.unseen]
    return round(float(np.mean(scores)), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with torch_threads(1):
        federation = tasks(drawings(), TASKS, NEWCOMERS, TRAINING, options.seed)
        torch.manual_seed(options.seed)
        folder, net = RUNS / f"maml-seed-{options.seed}", Objective(network())
        curve = trained(federation, net, options.rounds, options.seed, folder, EVERY)
        entry = {"curve": curve, "centroid": centroid(federation)}
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    found.setdefault("maml", {})[str(options.seed)] = entry
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    write(found, PAGE)


if __name__ == "__main__":
    try:
        main()
    except NufedError as error:
        sys.exit(f"external_maml: {error}")
    except KeyboardInterrupt:
        sys.exit("external_maml: stopped; the same command resumes it")
