"""The job of `make bench` with a row per convolutional net: nufed, a plain loop, and the floor.

All run whole rounds of the same sizes on one core; the floor is the convolutions and products alone
(floor.py), in the usual and in the channels-last layout, of which the faster counts.
"""

from functools import partial

import torch
from floor import ConvolutionFloor
from jobs import Ours, Plain, image_data
from measure import interleaved, median, ratio

from nufed import Objective
from nufed.models import cnn, lenet5, resnet8
from nufed.simulation import DirectEngine

NETS = {"McMahan CNN": cnn, "ResNet-8": resnet8, "LeNet-5": lenet5}
METHODS = {"FedAvg": (0, "first_order"), "FO nu=1": (1, "first_order"), "exact nu=1": (1, "exact")}
TARGET = 1.15  # times the floor, in CPU-seconds
LOCAL_STEPS = 2
LAYOUTS = {"floor": torch.contiguous_format, "floor, channels-last": torch.channels_last}


def contenders(make, data, sizes):
    shape = tuple(data.samples.inputs.shape[1:])
    torch.manual_seed(0)
    module = make(shape, 10)
    engine = DirectEngine(Objective(module), data, 0)
    found = {
        "plain loop": Plain(module, data, sizes.batch, LOCAL_STEPS),
        "nufed": Ours(engine, sizes.batch, LOCAL_STEPS),
    }
    inputs = data.samples.inputs[: sizes.batch]
    for name, layout in LAYOUTS.items():
        found[name] = ConvolutionFloor(module, inputs, LOCAL_STEPS, layout)
    return found


def convolutions_job(sizes):
    """CPU-seconds of a round, and nufed's as multiples of the floor's."""
    side, cohort = sizes.cnn_side, range(sizes.conv_cohort)
    data = image_data(len(cohort), sizes.cnn_samples, (3, side, side))
    print(
        f"\nconvolutional nets on {side} x {side} x 3, one core, {len(cohort)} agents a round, "
        f"tau = {LOCAL_STEPS}; CPU-ms: plain loop, nufed, floor, floor in channels-last"
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
                "against plain": ratio(times["plain loop"], times["nufed"], what="cpu"),
            }
            cpu = " ".join(f"{1e3 * median(own, 'cpu'):8.1f}" for own in times.values())
            share = row["against floor"]
            word = "reached" if share["median"] <= TARGET else "NOT reached"
            print(
                f"  {net + ', ' + method:24} {cpu}: {share['median']:.2f} x the floor "
                f"({share['from']:.2f} to {share['to']:.2f}), target <= {TARGET}: {word}; "
                f"{row['against plain']['median']:.2f} x the plain loop's speed"
            )
    return result
