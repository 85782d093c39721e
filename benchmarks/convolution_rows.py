"""The job of `make bench` with a row per convolutional net: nufed, a PyTorch loop, and the floor.

All run whole rounds of the same sizes on one core, nufed on the engine that `auto` chooses, with
and without bfloat16 and channels-last; the floor is the convolutions and products alone in float32
(floor.py), in the usual and in the channels-last layout, of which the faster counts.
"""

from functools import partial

import torch
from floor import ConvolutionFloor
from jobs import Ours, Plain, image_data
from measure import interleaved, median, ratio

from nufed import GMeta, Objective
from nufed.models import cnn, lenet5, resnet8
from nufed.simulation.choose_engine import Engines

NETS = {"McMahan CNN": cnn, "ResNet-8": resnet8, "LeNet-5": lenet5}
METHODS = {"FedAvg": (0, "first_order"), "FO nu=1": (1, "first_order"), "exact nu=1": (1, "exact")}
TARGET = 1.0  # times faster than the PyTorch loop, in CPU-seconds
VARIANTS = {
    "nufed": {},
    "nufed, channels-last": {"memory_format": "channels_last"},
    "nufed, bfloat16": {"precision": "bfloat16"},
    "nufed, both": {"memory_format": "channels_last", "precision": "bfloat16"},
}
LOCAL_STEPS = 2
LAYOUTS = {"floor": torch.contiguous_format, "floor, channels-last": torch.channels_last}


def contenders(make, data, sizes):
    shape = tuple(data.samples.inputs.shape[1:])
    torch.manual_seed(0)
    module = make(shape, 10)
    found = {"PyTorch loop": Plain(module, data, sizes.batch, LOCAL_STEPS)}
    for name, settings in VARIANTS.items():
        engines = Engines(Objective(module, **settings), data, 0)
        chosen = engines.choose(GMeta(batch_size=sizes.batch), "auto")
        found[name] = Ours(engines.get(chosen), sizes.batch, LOCAL_STEPS)
    inputs = data.samples.inputs[: sizes.batch]
    for name, layout in LAYOUTS.items():
        found[name] = ConvolutionFloor(module, inputs, LOCAL_STEPS, layout)
    return found


def convolutions_job(sizes):
    """CPU-seconds of a round, and how many times faster than the PyTorch loop it is."""
    side, cohort = sizes.cnn_side, range(sizes.conv_cohort)
    data = image_data(len(cohort), sizes.cnn_samples, (3, side, side))
    print(
        f"\nconvolutional nets on {side} x {side} x 3, one core, {len(cohort)} agents a round, "
        f"tau = {LOCAL_STEPS}; CPU-ms, and times faster than the PyTorch loop"
    )
    result = {}
    for net, make in NETS.items():
        found = contenders(make, data, sizes)
        for method, job in METHODS.items():
            works = {name: partial(each.round, cohort, *job) for name, each in found.items()}
            times = interleaved(works, sizes.conv_repeats)
            floor = min(LAYOUTS, key=lambda name: median(times[name], "cpu"))
            result[f"{net}, {method}"] = row = {
                "times": times,
                "floor": floor,
                "against floor": ratio(times["nufed"], times[floor], what="cpu"),
                "against plain": {
                    name: ratio(times["PyTorch loop"], times[name], what="cpu") for name in VARIANTS
                },
            }
            print(f"  {net}, {method}: plain {1e3 * median(times['PyTorch loop'], 'cpu'):.1f}")
            for name, speed in row["against plain"].items():
                print(
                    f"    {name:22} {1e3 * median(times[name], 'cpu'):7.1f}  "
                    f"{speed['median']:.2f} x ({speed['from']:.2f} to {speed['to']:.2f})"
                )
            share, speed = row["against floor"], row["against plain"]["nufed"]
            word = "reached" if speed["median"] >= TARGET else "NOT reached"
            print(f"    {share['median']:.2f} x the floor; target >= {TARGET} x plain: {word}")
    return result
