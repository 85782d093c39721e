"""The models that nufed can build by name, for data of a given shape."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from nufed.models.convolutional import cnn, cnn_groupnorm, lenet5, resnet8
from nufed.models.dense import ACTIVATIONS, MultiExit, fcnn, logistic, multi_exit
from nufed.models.recurrent import gru, lstm

__all__ = [
    "ACTIVATIONS",
    "MODELS",
    "MultiExit",
    "cnn",
    "cnn_groupnorm",
    "fcnn",
    "gru",
    "lenet5",
    "logistic",
    "lstm",
    "multi_exit",
    "resnet8",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "fcnn": fcnn,
    "logistic": logistic,
    "cnn": cnn,
    "cnn_groupnorm": cnn_groupnorm,
    "lenet5": lenet5,
    "resnet8": resnet8,
    "lstm": lstm,
    "gru": gru,
    "multi_exit": multi_exit,
}
