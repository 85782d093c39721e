"""FedAvg of `make external` as a plain PyTorch loop: does an independent program reach our numbers?

    python benchmarks/external_plain.py --rounds 6 [--augment]

trains on the split of `runs/external/cifar10`, with torch's SGD and nothing of nufed's training,
and adds the held-out accuracy of every round to docs/results/external.json. With `--augment`
images are shifted by up to 4 pixels and flipped at random, as the authors' code does.
"""

import argparse
import copy
import json

import torch
import torch.nn.functional as F
from external import DATA, RESULTS, RUNS, SETTING
from external_page import PAGE, write
from safetensors.torch import load_file

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


def plain_fedavg(train, held_out, split, rounds, augment):
    """The held-out accuracy of the global model after every round."""
    inputs = train.inputs.float() * train.scale + train.shift
    scored = held_out.inputs.float() * held_out.scale + held_out.shift
    agents = split["train"].split(split["train_sizes"].tolist())
    model, found = lenet5(train.input_shape, len(train.classes)), []
    for _ in range(rounds):
        models = [trained(model, inputs[a], train.targets[a], augment) for a in agents]
        with torch.no_grad():
            for after, *each in zip(
                model.parameters(), *(m.parameters() for m in models), strict=True
            ):
                weighted = (len(a) * p for a, p in zip(agents, each, strict=True))
                after.copy_(sum(weighted) / len(split["train"]))
            right = [
                (model(x).argmax(1) == y).sum().item()
                for x, y in zip(scored.split(1000), held_out.targets.split(1000), strict=True)
            ]
        found.append(round(sum(right) / len(scored), 5))
        print(f"round {len(found)}: {100 * found[-1]:.1f} %", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--augment", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    split = load_file(RUNS / "cifar10" / "splits" / "seed-0.safetensors")
    curve = plain_fedavg(*DATA["cifar10"](), split, options.rounds, options.augment)
    found = json.loads(RESULTS.read_text("utf-8"))
    name = "plain, augmented" if options.augment else "plain"
    found["cifar10"][name] = curve
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    write(found, PAGE)


if __name__ == "__main__":
    main()
