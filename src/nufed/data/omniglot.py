"""Omniglot as few-shot tasks: every agent tells apart a few characters under labels of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from nufed.data.samples import Samples
from nufed.errors import require, require_whole
from nufed.objective import Inputs
from nufed.seeding import stream

Array: TypeAlias = np.ndarray[Any, Any]
SIDE = 14  # pixels of a shipped drawing


def omniglot14(
    ways: int = 5,
    samples: int | None = None,
    tasks: int | None = None,
    seed: int = 0,
    newcomer_samples: int | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Samples:
    """Omniglot at 14×14 bits, shipped with nufed (Lake et al. 2015): few-shot tasks per agent.

    Every agent has ``ways`` characters of one alphabet, labelled 0 … ways − 1: the same label is
    another character at every agent, so that no global model fits all agents without fine-tuning.
    An agent is called like its alphabet, for example Greek-0. Those of the 20 official evaluation
    alphabets are held out from training.

    Args:
        ways: characters per agent.
        samples: drawings of each character, drawn at random; all 20 by default.
        tasks: agents of every alphabet, each with characters drawn at random: agents of one
            alphabet may share some. By default characters are dealt out, without overlap.
        seed: of these draws, independent of the run's seeds.
        newcomer_samples: drawings of each character of evaluation alphabets; as ``samples``.
        scale, shift: inputs are ``scale`` + ``shift`` where there is ink, else ``shift``.

    >>> data = omniglot14()
    >>> len(data), data.input_shape, len(set(data.owners)), len(data.unseen_owners)
    (30900, (14, 14), 309, 128)
    """
    with as_file(files("nufed.data") / "omniglot14.npz") as path, np.load(path) as archive:
        ink = archive["ink"]
        characters = Characters(
            archive["alphabet"], archive["character"], archive["alphabets"], archive["evaluation"]
        )
    dealt = characters.deal(ways, samples, tasks, seed, newcomer_samples)
    bits = np.unpackbits(ink[dealt.rows], axis=1, count=SIDE * SIDE)
    return dealt.of(torch.from_numpy(bits.reshape(-1, SIDE, SIDE)), scale, shift)


class Tasks(NamedTuple):
    """The rows of drawings that agents hold, their labels, and whose they are."""

    rows: Array
    labels: list[int]
    owners: list[str]
    unseen: tuple[str, ...]
    ways: int

    def of(self, inputs: Inputs, scale: float = 1.0, shift: float = 0.0) -> Samples:
        """The samples, from the inputs of these rows."""
        return Samples(
            inputs=inputs,
            targets=torch.tensor(self.labels),
            classes=tuple(map(str, range(self.ways))),
            owners=np.array(self.owners),
            scale=scale,
            shift=shift,
            unseen_owners=self.unseen,
        )


@dataclass(frozen=True)
class Characters:
    """Which character every drawing is of.

    Args:
        alphabet: of a drawing, as a place in ``alphabets``.
        character: of a drawing, as a number within its alphabet.
        alphabets: their names.
        evaluation: which alphabets only unseen agents have.
    """

    alphabet: Array
    character: Array
    alphabets: Array
    evaluation: Array

    def deal(
        self,
        ways: int,
        samples: int | None,
        tasks: int | None,
        seed: int,
        newcomer_samples: int | None = None,
    ) -> Tasks:
        """The tasks of all agents; the arguments are those of :func:`omniglot14`."""
        optional = {"samples": samples, "tasks": tasks, "newcomer_samples": newcomer_samples}
        require_whole(2, ways=ways)
        require_whole(**{name: value for name, value in optional.items() if value is not None})
        rows, labels, owners, unseen = [], [], [], []
        for number, name in enumerate(self.alphabets):
            rng = stream(seed, "omniglot", agent=number)
            drawings, most = self._drawings(number), samples
            if self.evaluation[number] and newcomer_samples is not None:
                most = newcomer_samples
            for task, characters in enumerate(_draw(list(drawings), ways, tasks, rng)):
                owner = f"{name}-{task}"
                unseen += [owner] * bool(self.evaluation[number])
                for label, character in enumerate(characters):
                    drawn = drawings[character]
                    if most is not None:
                        drawn = np.sort(rng.permutation(drawn)[:most])
                    rows.append(drawn)
                    labels += [label] * len(drawn)
                    owners += [owner] * len(drawn)
        require(bool(rows), "ways", ways, "must be at most the number of characters of an alphabet")
        return Tasks(np.concatenate(rows), labels, owners, tuple(unseen), ways)

    def _drawings(self, alphabet: int) -> dict[int, Array]:
        """The rows of every character of an alphabet."""
        rows = np.flatnonzero(self.alphabet == alphabet)
        characters = self.character[rows]
        return {int(each): rows[characters == each] for each in np.unique(characters)}


def _draw(
    characters: list[int], ways: int, tasks: int | None, rng: np.random.Generator
) -> list[Sequence[int]]:
    """The characters of every task of an alphabet."""
    if len(characters) < ways:
        return []
    if tasks is not None:
        return [rng.choice(characters, ways, replace=False).tolist() for _ in range(tasks)]
    dealt = rng.permutation(characters).tolist()
    return [dealt[ways * task : ways * (task + 1)] for task in range(len(dealt) // ways)]
