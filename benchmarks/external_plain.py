"""FedAvg of `make external` as a plain PyTorch loop: does an independent program reach our numbers?

    python benchmarks/external_plain.py --rounds 6 [--augment]

trains on the split of `runs/external/cifar10`, with torch's SGD and nothing of nufed's training,
and adds the held-out accuracy of every round to docs/results/external.json. With `--augment`
images are shifted by up to 4 pixels and flipped at random, as the authors' code does (which pads
them by reflection, here with zeros). The model of the last round is in `runs/external`, and the
same command resumes from there.
"""

import argparse
import copy
import json

import torch
import torch.nn.functional as F
from external import DATA, RESULTS, RUNS, SETTING
from external_page import PAGE, write
from safetensors.torch import load_file, save_file

from nufed.models import lenet5


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Every image shifted by up to 4 pixels in both directions, and flipped with probability ½."""
    size = images.shape[-1]
    padded = F.pad(images, (4, 4, 4, 4))
    starts = torch.randint(0, 9, (len(images), 2))
    rows, columns = (starts[:, i, None] + torch.arange(size) for i in (0, 1))
    flip = torch.rand(len(images)) < 0.5
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    each = torch.arange(len(images))[:, None, None]
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def trained(model, inputs, targets, augment):
    """The agent's epochs of SGD."""
    own, method = copy.deepcopy(model).train(), SETTING["method"]
    sgd = torch.optim.SGD(
        own.parameters(),
        lr=method["meta_lr"],
        momentum=method["momentum"],
        weight_decay=method["weight_decay"],
    )
    for _ in range(method["local_epochs"]):
        for rows in torch.randperm(len(inputs)).split(method["batch_size"]):
            batch = augmented(inputs[rows]) if augment else inputs[rows]
            sgd.zero_grad()
            F.cross_entropy(own(batch), targets[rows]).backward()
            sgd.step()
    return own


def next_round(model, inputs, targets, agents, augment):
    """Train every agent from the model, and overwrite it with their mean, weighted by samples."""
    models = [trained(model, inputs[a], targets[a], augment) for a in agents]
    samples = sum(len(a) for a in agents)
    with torch.no_grad():
        for after, *each in zip(model.parameters(), *(m.parameters() for m in models), strict=True):
            weighted = (len(a) * p for a, p in zip(agents, each, strict=True))
            after.copy_(sum(weighted) / samples)


@torch.no_grad()
def accuracy(model, inputs, targets):
    pairs = zip(inputs.split(1000), targets.split(1000), strict=True)
    right = [(model(x).argmax(1) == y).sum().item() for x, y in pairs]
    return round(sum(right) / len(inputs), 5)


def as_floats(samples):
    return samples.inputs.float() * samples.scale + samples.shift


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--augment", action="store_true")
    options = parser.parse_args()
    name = "plain, augmented" if options.augment else "plain"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, held_out = DATA["cifar10"]()
    split = load_file(RUNS / "cifar10" / "splits" / "seed-0.safetensors")
    agents = split["train"].split(split["train_sizes"].tolist())
    inputs, scored = as_floats(train), as_floats(held_out)
    model, saved = lenet5(train.input_shape, len(train.classes)), RUNS / f"{name}.safetensors"
    curve = []
    if saved.exists():
        state = load_file(saved)
        curve = state.pop("curve").tolist()
        model.load_state_dict(state)
    for number in range(len(curve) + 1, options.rounds + 1):
        torch.manual_seed(number)
        next_round(model, inputs, train.targets, agents, options.augment)
        curve.append(accuracy(model, scored, held_out.targets))
        save_file({**model.state_dict(), "curve": torch.tensor(curve, dtype=torch.float64)}, saved)
        print(f"round {number}: {100 * curve[-1]:.1f} %", flush=True)
    found = json.loads(RESULTS.read_text("utf-8"))
    found["cifar10"][name] = curve
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    write(found, PAGE)


if __name__ == "__main__":
    main()
