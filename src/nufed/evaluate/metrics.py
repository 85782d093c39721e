"""Scores of outputs against classes, by name in a configuration (``metric = "f1"``).

A metric is any function ``metric(outputs, targets)`` of the scored samples of one agent that gives
a number: one's own is named as ``package.module:function`` or passed in Python, and
``metric_better = "lower"`` says that less of it is better. All here need one output per class, and
give NaN where an output is not finite. Perplexity and bits per character are for classes, and for
tokens with outputs (samples, length, vocabulary); less of them is better.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.data.text import next_token_loss
from nufed.errors import InputError

Metric: TypeAlias = Callable[[Tensor, Tensor], float | Tensor]
Better: TypeAlias = Literal["higher", "lower"]


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of targets whose class has the largest output; NaN if an output is not finite.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    0.5
    """
    return accuracies(outputs[None], targets)[0]


def accuracies(outputs: Tensor, targets: Tensor) -> list[float]:
    """The accuracy of every model, whose outputs are stacked."""
    _check(outputs[0], targets, "accuracy")
    right = (outputs.argmax(dim=2) == targets).sum(dim=1).tolist()
    finite = torch.isfinite(outputs).flatten(1).all(dim=1).tolist()
    # argmax would call outputs that are not finite class 0
    return [n / len(targets) if ok else math.nan for n, ok in zip(right, finite, strict=True)]


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The mean over the classes among the targets of the accuracy on each.

    >>> outputs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    >>> balanced_accuracy(outputs, torch.tensor([0, 0, 1, 1]))
    0.75
    """
    _check(outputs, targets, "balanced_accuracy")
    if not torch.isfinite(outputs).all():
        return float("nan")
    right, _, actual = _confusion(outputs, targets)
    return float((right[actual > 0] / actual[actual > 0]).mean())


def f1(outputs: Tensor, targets: Tensor) -> float:
    """Macro F1: the mean of 2·TP/(2·TP + FP + FN) over the classes among targets and answers.

    >>> outputs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    >>> round(f1(outputs, torch.tensor([0, 0, 1, 1])), 4)  # (4/5 + 2/3)/2
    0.7333
    """
    _check(outputs, targets, "f1")
    if not torch.isfinite(outputs).all():
        return float("nan")
    right, answered, actual = _confusion(outputs, targets)
    held = answered + actual > 0
    return float((2 * right / (answered + actual))[held].mean())


def auc(outputs: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve, of every class against the rest, mean over classes.

    That is the probability that a sample of the class gets a larger (softmax) probability of it
    than one of another class; ties count half. Classes that no target has, or all have, are left
    out. Targets of one class alone rank nothing: 0.5, as by chance.

    >>> outputs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    >>> auc(outputs, torch.tensor([0, 1, 0, 1]))
    0.75
    """
    _check(outputs, targets, "auc")
    if not torch.isfinite(outputs).all():
        return float("nan")
    outputs, areas = outputs.double(), []
    for number in sorted(set(targets.tolist())):
        members = targets == number
        if members.all():
            return 0.5
        # log-odds rank as probabilities do, and do not all round to 1
        rest = outputs.index_fill(1, torch.tensor(number, device=outputs.device), -torch.inf)
        odds = outputs[:, number] - rest.logsumexp(dim=1)
        among, others = odds[members], odds[~members].sort().values
        below = torch.searchsorted(others, among)
        not_above = torch.searchsorted(others, among, right=True)
        areas.append(float((below + not_above).double().mean()) / (2 * len(others)))
    return sum(areas) / len(areas)


def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """exp of the mean cross-entropy over all tokens: among how many it is as good as guessing.

    >>> round(perplexity(torch.zeros(2, 3, 7), torch.ones(2, 3, dtype=torch.long)), 4)
    7.0
    """
    with contextlib.suppress(OverflowError):
        return math.exp(_cross_entropy(outputs, targets, "perplexity"))
    return math.inf


def bits_per_character(outputs: Tensor, targets: Tensor) -> float:
    """The mean cross-entropy in bits, log2 of the perplexity; per token, if not characters.

    >>> bits_per_character(torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.long))
    3.0
    """
    return _cross_entropy(outputs, targets, "bits_per_character") / math.log(2)


METRICS: dict[str, Metric | None] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "auc": auc,
    "perplexity": perplexity,
    "bits_per_character": bits_per_character,
    "none": None,
}
"""The metrics that a configuration knows by name; ``none`` scores by the loss."""

OF_TOKENS = ("perplexity", "bits_per_character")
"""Those that targets which are tokens have, and of which less is better."""


def _cross_entropy(outputs: Tensor, targets: Tensor, name: str) -> float:
    if targets.is_floating_point() or (targets.ndim > 1 and outputs.ndim != targets.ndim + 1):
        raise InputError(
            f"{name} needs one output per class or token, and the model gives outputs of shape "
            f"{tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: set "
            "model.args.next_token = true, or give a metric of your own"
        )
    if targets.ndim == 1:
        _check(outputs, targets, name)
    return float(next_token_loss(outputs.double(), targets))


def _check(outputs: Tensor, targets: Tensor, name: str) -> None:
    if outputs.ndim != 2 or outputs.shape[1] < 2 or int(targets.max()) >= outputs.shape[1]:
        raise InputError(
            f"{name} needs one output per class, and the model gives outputs of shape "
            f"{tuple(outputs.shape)} for classes up to {int(targets.max())}: change the model, or "
            "give a metric of your own"
        )


def _confusion(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of right answers, of answers and of samples, by class."""
    classes = outputs.shape[1]
    answers, actual = (F.one_hot(x, classes).double() for x in (outputs.argmax(dim=1), targets))
    return (answers * actual).sum(dim=0), answers.sum(dim=0), actual.sum(dim=0)
