"""Text as sequences of tokens, whose next tokens a model predicts.

Targets are whole numbers in two dimensions (samples, length): every token's successor. Models give
outputs of shape (samples, length, vocabulary).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.data.samples import Samples
from nufed.errors import InputError, require_whole, shown
from nufed.objective.micro_batches import IGNORED


def characters(texts: Mapping[str, str], known: str = "") -> tuple[str, dict[str, list[int]]]:
    """The characters of all texts in their order, and every text as their numbers.

    ``known``: characters in a given order instead, of which the texts must consist.

    >>> characters({"a": "to be", "b": "bee"})
    (' beot', {'a': [4, 3, 0, 1, 2], 'b': [1, 2, 2]})
    """
    alphabet = known or "".join(sorted(set().union(*texts.values())))
    numbers = {character: number for number, character in enumerate(alphabet)}
    for owner, text in texts.items():
        if unknown := sorted(set(text) - numbers.keys()):
            raise InputError(
                f"the text of {shown(owner)} has the character {shown(unknown[0])}, which is not "
                f"one of the {len(alphabet)} known ones: remove it"
            )
    return alphabet, {owner: [numbers[c] for c in text] for owner, text in texts.items()}


def windows(tokens: Mapping[str, Sequence[int]], length: int = 80, least: int = 10) -> Samples:
    """Every owner's tokens, cut into windows that follow one another; targets are one token later.

    No two windows predict the same token of a text. What is left at its end is not used.

    Args:
        tokens: by owner.
        length: tokens per window.
        least: windows that an owner must have; others are left out.

    >>> samples = windows({"a": range(9), "b": range(3)}, length=4, least=1)
    >>> samples.inputs.tolist(), samples.targets.tolist()
    ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]])
    """
    require_whole(length=length, least=least)
    inputs, targets, owners = [], [], []
    for owner, words in tokens.items():
        count = (len(words) - 1) // length
        if count >= least:
            line = torch.from_numpy(np.fromiter(words, np.int64, len(words)))
            inputs.append(line[: count * length].view(count, length))
            targets.append(line[1 : count * length + 1].view(count, length))
            owners += [owner] * count
    if not inputs:
        raise InputError(
            f"no text has {least} windows of {length} tokens: lower data.args.least or length"
        )
    return Samples(torch.cat(inputs), torch.cat(targets), owners=np.array(owners))


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens but those whose target is −100.

    ``outputs`` are (…, vocabulary), ``targets`` (…).
    """
    if outputs.shape[:-1] != targets.shape:
        raise InputError(
            f"the outputs have shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}:"
            " predicting next tokens needs one output per token and entry of the vocabulary (models"
            " gru and lstm: model.args.next_token = true)"
        )
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
