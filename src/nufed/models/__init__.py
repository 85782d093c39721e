"""The models that nufed can build by name, for data of a given shape."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from nufed.models.convolutional import (
    cnn as cnn,
    cnn_groupnorm as cnn_groupnorm,
    lenet5 as lenet5,
    resnet8 as resnet8,
)
from nufed.models.dense import (
    ACTIVATIONS as ACTIVATIONS,
    MultiExit as MultiExit,
    fcnn as fcnn,
    logistic as logistic,
    multi_exit as multi_exit,
)
from nufed.models.recurrent import gru as gru, lstm as lstm

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
