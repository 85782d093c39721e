"""The deployable meta-model: made once, shipped as a file, adapted by anyone to their own data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from torch import nn

from nufed.adapt import Rate, per_coordinate
from nufed.bundle.about import About, AdaptAbout, InputsAbout, ModelAbout, checked, read_about
from nufed.bundle.adapting import cross_validate, fine_tuned
from nufed.bundle.archive import CARD, MANIFEST, WEIGHTS, read_parts, write_parts
from nufed.bundle.building import build_loss, build_model, load_state, read_weights
from nufed.bundle.card import card_of
from nufed.bundle.personal import Adapted, prepared
from nufed.errors import InputError, require
from nufed.objective import Loss, Objective
from nufed.runs.build import LOSSES, find_named
from nufed.runs.durable import Pieces, sha256, signed, verified
from nufed.runs.tensors import tensor_pieces
from nufed.threads import torch_threads

MAX_STEPS = 10  # that `steps="auto"` considers, if the model was not trained for more


@dataclass(frozen=True)
class Bundle:
    """A meta-model with all that is needed to fine-tune it on one's own data.

    Args:
        about: how it is built, fed and fine-tuned, and what was measured (:class:`About`).
        module: the meta-model itself.
        loss: what fine-tuning lowers.
    """

    about: About
    module: nn.Module
    loss: Loss

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        input_shape: tuple[int, ...],
        adapt_lr: float | Mapping[str, float],
        lr_scale: float | None = None,
        adapt_steps: int = 1,
        batch_size: int = 40,
        classes: tuple[str, ...] = (),
        loss: str | Loss = "auto",
        weights: str | Path | None = None,
        input_dtype: str = "float32",
        scale: float = 1.0,
        shift: float = 0.0,
        build: str | None = None,
        args: Mapping[str, Any] | None = None,
        running_stats: Literal["refuse", "frozen"] = "refuse",
        name: str = "meta-model",
        trained: Mapping[str, Any] | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> Bundle:
        """A bundle of any module, however it was trained.

        Args:
            module: the meta-model.
            input_shape, input_dtype, scale, shift: one input, and how bytes become numbers.
            adapt_lr, adapt_steps, batch_size: α (one number, or one per parameter by name), ν and
                D of fine-tuning.
            lr_scale: where α was chosen on validation samples, what it is over that of training.
            classes: names of classes, in the order of outputs; none for regression.
            loss: ``"cross_entropy"``, ``"mse"``, an import path, or a function, which then has to
                be passed again when the bundle is loaded; by default what suits the targets.
            weights: a safetensors file with the module's state, to be loaded first.
            build, args: how to build the module again: a model of nufed's, or
                ``package.module:function``, which is imported only for those who say
                ``trust=True``. Without it the module has to be passed when the bundle is loaded.
            name, trained, measured: for the card.
        """
        if weights is not None:
            module = copy.deepcopy(module)
            load_state(module, read_weights(Path(weights).read_bytes()))
        if loss == "auto":
            loss = "cross_entropy" if classes else "mse"
        named = isinstance(loss, str)
        about = checked(
            lambda: About(
                nufed=version("nufed"),
                name=name,
                model=ModelAbout(build=build, args=dict(args or {}), running_stats=running_stats),
                inputs=InputsAbout.model_validate(
                    {
                        "shape": list(input_shape),
                        "dtype": input_dtype,
                        "scale": scale,
                        "shift": shift,
                    }
                ),
                adapt=AdaptAbout(
                    steps=adapt_steps,
                    lr=dict(adapt_lr) if isinstance(adapt_lr, Mapping) else adapt_lr,
                    lr_scale=lr_scale,
                    batch_size=batch_size,
                ),
                loss=str(loss) if named else None,
                classes=list(classes),
                dtype=_dtype_name(module),
                trained=dict(trained or {}),
                measured=dict(measured or {}),
            )
        )
        function: Loss = find_named("loss", loss, LOSSES) if isinstance(loss, str) else loss
        bundle = cls(about, copy.deepcopy(module).eval(), function)
        bundle.rate()  # names of parameters and the card are checked now, not at the user's
        _ = bundle.card
        return bundle

    @cached_property
    def card(self) -> str:
        """The description for people, in Markdown; it is never read from a file."""
        return card_of(self.about)

    @cached_property
    def objective(self) -> Objective:
        return Objective(self.module, self.loss, running_stats=self.about.model.running_stats)

    def rate(self) -> Rate:
        """α as fine-tuning takes it: one number, or one per coordinate."""
        lr = self.about.adapt.lr
        if not isinstance(lr, Mapping):
            return lr
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if parameters.keys() != lr.keys():
            raise InputError(
                f"adapt.lr is about {', '.join(sorted(lr))}: it must name every trainable "
                f"parameter, {', '.join(sorted(parameters))}"
            )
        initial = self.objective.initial()
        return per_coordinate(initial.new_tensor([lr[n] for n in parameters]), self.objective.sizes)

    def adapt(
        self,
        inputs: Any,
        targets: Any,
        *,
        steps: int | Literal["auto"] | None = None,
        max_steps: int | None = None,
        seed: int = 0,
    ) -> Adapted:
        """Fine-tune the meta-model on one's own data, and say what that did.

        What it did is measured by cross-validation: each of five parts of the data is held back
        once, and scored by a model that was fine-tuned on the others. The model that is returned
        is fine-tuned on all of the data.

        Args:
            inputs: one sample per row, in the units of the training data (bytes stay bytes).
            targets: class numbers or names; for regression numbers.
            steps: fine-tuning steps; those the model was trained for by default. ``"auto"`` lets
                cross-validation choose between 0 and ``max_steps``.
            seed: of the batches.

        Returns:
            ``.module``, a plain ``nn.Module`` that takes inputs as they are given here, and
            ``.report``.
        """
        if steps is None:
            steps = self.about.adapt.steps
        whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
        require(
            whole or steps == "auto", "steps", steps, 'must be a whole number, 0 or more, or "auto"'
        )
        most = max_steps or max(MAX_STEPS, 2 * self.about.adapt.steps)
        samples = self.about.samples(inputs, targets)
        if len(samples) < 2:
            raise InputError("there is 1 sample: adapting needs at least 2, better 20 or more")
        with torch_threads(1):  # the same bits everywhere on this machine
            report = cross_validate(self, samples, steps, most, seed)
            *_, w = fine_tuned(self, samples, range(len(samples)), report.steps, seed)
        return Adapted(self.about, prepared(self.about, self.objective.module(w)), report)

    def unadapted(self) -> Adapted:
        """The meta-model as it is, ready for use."""
        return Adapted(self.about, prepared(self.about, copy.deepcopy(self.module)), None)

    def save(self, path: str | Path) -> Path:
        """Write it: one file if ``path`` ends in .nufed, else a new directory."""
        weights = tensor_pieces(self.module.state_dict())
        parts: dict[str, bytes | Pieces] = {WEIGHTS: weights, CARD: self.card.encode()}
        manifest = {
            "about": self.about.model_dump(mode="json"),
            "sha256": {name: sha256(content) for name, content in parts.items()},
        }
        write_parts(Path(path), {**parts, MANIFEST: signed(manifest)})
        return Path(path)


def load_bundle(
    path: str | Path,
    *,
    trust: bool = False,
    module: nn.Module | None = None,
    loss: Loss | None = None,
) -> Bundle:
    """Read a bundle; no code of it is run.

    Args:
        path: a ``.nufed`` file or a directory.
        trust: allow it to import the function that builds its model, if it names one.
        module, loss: for bundles that were made of objects: the same module and loss again.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist: give a bundle, a .nufed file or a directory")
    parts = read_parts(path)
    try:
        manifest = verified(parts[MANIFEST])
        for name in (WEIGHTS, CARD):
            if sha256(parts[name]) != manifest["sha256"][name]:
                raise InputError(f"{name} is damaged, its SHA-256 differs")
        about = read_about(manifest["about"])
        built = build_model(about, read_weights(parts[WEIGHTS]), trust, module)
        bundle = Bundle(about, built, build_loss(about, trust, loss))
        bundle.rate()
        _ = bundle.card
        bundle.objective.initial()
    except Exception as error:  # whatever a crafted bundle does
        raise InputError(f"{path} can't be used: {error}") from error
    return bundle


def _dtype_name(module: nn.Module) -> Any:
    parameter = next(module.parameters(), None)
    return str(parameter.dtype).removeprefix("torch.") if parameter is not None else "float32"
