"""The deployable meta-model: shipped as a file, adapted by users to their own data."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor, nn

from nufed.data import Preparation
from nufed.errors import InputError, require
from nufed.lab.bundle.about import (
    About,
    BaseAbout,
    InputsAbout,
    PersonalAbout,
    card_of,
    checked,
    read_about,
)
from nufed.lab.bundle.adapting import Adapted, cross_validate, fine_tuned, prepared
from nufed.lab.bundle.building import (
    MissingPartError,
    build_loss,
    build_model,
    load_state,
    stored_state,
)
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.problem import LOSSES, find_named
from nufed.lab.config.schema import LoraConfig
from nufed.lab.files import unseal, write_sealed
from nufed.lab.pretrained import PREFIX, architecture_of, revision_of
from nufed.meta.fine_tuning import Rate, by_step, per_coordinate
from nufed.models.trainable import base_digest, base_parameters
from nufed.objective import Loss, Objective
from nufed.objective.modules import RunningStats, copied

SUFFIX = ".nufed"
STORED_RATES = "fine-tuning/rates"  # a tensor's name in a file
MAX_BYTES = 2**33  # of a file
MAX_STEPS = 10  # considered by `steps="auto"`, or twice those that the model was trained for


@dataclass(frozen=True)
class Bundle:
    """A meta-model with everything needed to fine-tune it on a user's data.

    Args:
        about: how it is built, preprocessed and fine-tuned, and its scores (:class:`About`).
        module: the meta-model itself.
        loss: minimised by fine-tuning.
        stored_rates: α, one per coordinate or a row of these per step, if ``about`` says so.
    """

    about: About
    module: nn.Module
    loss: Loss
    stored_rates: Tensor | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        input_shape: tuple[int, ...],
        adapt_lr: float | Mapping[str, float] | Tensor,
        lr_scale: float | None = None,
        adapt_steps: int = 1,
        batch_size: int = 40,
        classes: tuple[str, ...] = (),
        loss: str | Loss = "auto",
        weights: str | Path | None = None,
        input_dtype: str = "float32",
        scale: float = 1.0,
        shift: float = 0.0,
        input_range: Mapping[str, float] | None = None,
        target_dtype: str | None = None,
        build: str | None = None,
        args: Mapping[str, Any] | None = None,
        running_stats: RunningStats = "refuse",
        train: str = "all",
        lora: LoraConfig | None = None,
        name: str = "meta-model",
        trained: Mapping[str, Any] | None = None,
        measured: Mapping[str, Any] | None = None,
        personal: PersonalAbout | None = None,
        preparation: Preparation | None = None,
        several: Mapping[str, InputsAbout] | None = None,
        carry_base: bool | None = None,
    ) -> Bundle:
        """A bundle of any module, however it was trained.

        Args:
            module: the meta-model.
            input_shape, input_dtype, scale, shift: the format of one input, and how bytes are
                converted.
            input_range: ``low``, ``high``, ``mean`` and ``std`` of the raw inputs of training;
                data on another scale is then warned about.
            target_dtype: ``"int64"`` for targets that are whole numbers but no classes, such as
                sequences of tokens; by default they are numbers to predict.
            adapt_lr, adapt_steps, batch_size: α (one number, one per parameter by name, or a vector
                like :meth:`nufed.Objective.initial`, or a row of these per step), ν and D of
                fine-tuning.
            lr_scale: if α was chosen on validation samples, its ratio to that of training; 0: no
                step lowered the loss.
            classes: names of classes, in the order of outputs; none for regression.
            loss: ``"cross_entropy"``, ``"mse"``, an import path, or a function, which then has to
                be passed again when the bundle is loaded; by default cross-entropy with classes,
                else squared error.
            weights: a safetensors file with the module's state, to be loaded first.
            build, args: how to build the module: a model of nufed, or
                ``package.module:function``, which is imported only with ``trust=True``. Without
                it the module has to be passed when the bundle is loaded.
            train, lora: what ``[model]`` of the run trains; fine-tuning changes the same part.
            name, trained, measured: for the card.
            personal: of a personal model that is more than a module, what else it needs.
            preparation: how the raw columns of a table become inputs; ``adapt`` then takes these.
            several: the formats of several inputs by name, in place of ``input_shape`` and the like
                (which are then those of the first); names that are numbers: by position.
            carry_base: whether the file holds frozen parameters, too; by default it does unless
                they are those of a pretrained model that ``build`` names (``hf:``).
        """
        module = (copied(module) if weights is None else copy.deepcopy(module)).eval()
        if weights is not None:
            load_state(module, load_file(weights))
        if loss == "auto":
            loss = "cross_entropy" if classes else "mse"
        stored = adapt_lr if isinstance(adapt_lr, Tensor) else None
        lr: object = dict(adapt_lr) if isinstance(adapt_lr, Mapping) else adapt_lr
        lr = lr if stored is None else "stored"
        adapt = {"steps": adapt_steps, "lr": lr, "lr_scale": lr_scale, "batch_size": batch_size}
        about = checked(
            {
                "nufed": version("nufed"),
                "name": name,
                "model": {
                    "build": build,
                    "args": dict(args or {}),
                    "running_stats": running_stats,
                    "train": train,
                    "lora": lora if train == "lora" else None,
                    "architecture": architecture_of(module),
                    "base": base_about(module, build, args or {}, carry_base),
                },
                "inputs": {
                    "shape": list(input_shape),
                    "dtype": input_dtype,
                    "scale": scale,
                    "shift": shift,
                    "range": None if input_range is None else dict(input_range),
                },
                "adapt": adapt,
                "loss": loss if isinstance(loss, str) else None,
                "classes": list(classes),
                "dtype": _dtype_name(module),
                "target_dtype": target_dtype,
                "trained": dict(trained or {}),
                "measured": dict(measured or {}),
                "personal": personal,
                "preparation": preparation,
                "names": list(several or {}),
                "further": list((several or {}).values())[1:],
            }
        )
        about = about.model_copy(update={"format": about.oldest_format})
        function: Loss = find_named("loss", loss, LOSSES) if isinstance(loss, str) else loss
        return cls(about, module, function, stored)._checked()

    def _checked(self) -> Bundle:
        """Itself, after names of parameters and the card were checked."""
        self.rate()
        _ = self.card
        return self

    @cached_property
    def card(self) -> str:
        """The model card in Markdown, made from the metadata, never read from a file."""
        return card_of(self.about)

    @cached_property
    def objective(self) -> Objective:
        return Objective(self.module, self.loss, running_stats=self.about.model.running_stats)

    def rate(self) -> Rate:
        """α as fine-tuning takes it: one number, or one per coordinate, or these by step."""
        lr = self.about.adapt.lr
        if lr == "stored":
            return self._checked_rates()
        if not isinstance(lr, Mapping):
            return lr
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if parameters.keys() != lr.keys():
            raise InputError(
                f"adapt.lr has step sizes for {', '.join(sorted(lr))}: it must have one for every "
                f"trainable parameter, {', '.join(sorted(parameters))}"
            )
        initial, sizes = self.objective.initial(), self.objective.sizes
        rates = [lr[n] for n in parameters]
        rates += [0.0] * (len(sizes) - len(rates))  # of tracked statistics
        return per_coordinate(initial.new_tensor(rates), sizes)

    def _checked_rates(self) -> Tensor:
        """The stored step sizes, refused where they are not those of the model."""
        rates, like = self.stored_rates, self.objective.initial()
        if rates is None:
            raise InputError('adapt.lr is "stored", and there are no step sizes beside the weights')
        by_step(rates, like)
        ok = rates.ndim > 0 and bool((rates.isfinite() & (rates >= 0)).all())
        require(ok, "adapt.lr", rates, "the stored step sizes must be finite numbers, 0 or more")
        return rates

    def adapt(
        self,
        inputs: Any,
        targets: Any,
        *,
        steps: int | Literal["auto"] | None = None,
        max_steps: int | None = None,
        lr: float | None = None,
        seed: int = 0,
        anyway: bool = False,
    ) -> Adapted:
        """Fine-tune the meta-model on a user's data, and measure the effect.

        The effect is measured by cross-validation: each of five folds is scored by a model that
        was fine-tuned on the others. The returned model is fine-tuned on all of the data; if the
        verdict is that this harms, it is the unadapted model (``report.refused``).

        Args:
            inputs: one sample per row, in the units of the training data (bytes stay bytes); of a
                table its raw columns by name, a mapping or a data frame.
            targets: class numbers or names; for regression numbers.
            steps: fine-tuning steps; by default those that the model was trained for. ``"auto"``
                chooses between 0 and ``max_steps`` by cross-validation.
            max_steps: with ``"auto"``, at most so many; by default at least 10, and twice those
                that the model was trained for.
            lr: the step size; by default the bundle's.
            seed: of the batches.
            anyway: return the fine-tuned model even if fine-tuning harms.

        Returns:
            ``.module``, a plain ``nn.Module`` that takes raw inputs as here, and ``.report``.
        """
        if lr is not None:
            ok = isinstance(lr, int | float) and 0 < lr < math.inf
            require(ok, "lr", lr, "must be a number above 0")
            size = self.about.adapt.model_copy(update={"lr": float(lr), "lr_scale": None})
            self = replace(self, about=self.about.model_copy(update={"adapt": size}))
        if steps is None:
            steps = self.about.adapt.steps
        whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
        require(
            whole or steps == "auto", "steps", steps, 'must be a whole number, 0 or more, or "auto"'
        )
        if max_steps is not None:
            require(max_steps >= 1, "max_steps", max_steps, "must be a whole number, 1 or more")
            require(steps == "auto", "max_steps", max_steps, 'is for steps="auto" (--steps auto)')
        most = max_steps or max(MAX_STEPS, 2 * self.about.adapt.steps)
        samples = self.about.samples(inputs, targets)
        if len(samples) < 2:
            raise InputError("there is 1 sample: adapting needs at least 2, better 20 or more")
        outside = self.about.warn_outside(samples.inputs)
        with torch_threads(1):  # the same bits everywhere on this machine
            report = cross_validate(self, samples, steps, most, seed, outside)
            report = replace(report, refused=report.verdict == "harmed" and not anyway)
            taken = 0 if report.refused else report.steps
            *_, w = fine_tuned(self, samples, range(len(samples)), taken, seed)
        return Adapted(self.about, prepared(self.about, self.objective.module(w)), report)

    def unadapted(self) -> Adapted:
        """The meta-model without fine-tuning, ready for use."""
        return Adapted(self.about, prepared(self.about, copied(self.module)), None)

    def save(self, path: str | Path) -> Path:
        """Write it as one sealed file, whose name ends in .nufed."""
        path = Path(path)
        require(path.suffix == SUFFIX, "path", path.name, f"must end in {SUFFIX}")
        about = {"bundle": self.about.model_dump(mode="json")}
        tensors = stored_state(self.about, self.module)
        if self.about.adapt.lr == "stored":
            tensors[STORED_RATES] = self._checked_rates()
        write_sealed(path, about, tensors)
        return path


def load_bundle(
    path: str | Path,
    *,
    trust: bool = False,
    module: nn.Module | None = None,
    loss: Loss | None = None,
    base: str | None = None,
) -> Bundle:
    """Read a bundle; runs no code from the file.

    Args:
        path: a ``.nufed`` file.
        trust: allow importing the functions that it names to build its model and loss, if any.
        module, loss: for bundles that were made from objects: the same module and loss.
        base: of a bundle that names a pretrained base model: the folder of that model, or its name
            in the local cache; by default where the bundle says. Another model is refused.
    """
    with _opened(Path(path)) as (about, tensors):
        weights = {name: tensor for name, tensor in tensors.items() if name != STORED_RATES}
        built = build_model(about, weights, trust, module, base)
        rates = tensors.get(STORED_RATES)
        bundle = Bundle(about, built, build_loss(about, trust, loss), rates)._checked()
        bundle.objective.initial()
    return bundle


def read_card(path: str | Path) -> tuple[About, str]:
    """The metadata and the card of a bundle; builds no model and imports nothing."""
    with _opened(Path(path)) as (about, _):
        return about, card_of(about)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[About, Mapping[str, Tensor]]]:
    """The metadata and weights of a bundle; an error inside this context names the file."""
    if not path.is_file():
        raise InputError(f"{path} is not a file: give a bundle, a {SUFFIX} file")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"it is larger than {MAX_BYTES} bytes")
        sealed = unseal(path.read_bytes())
        if "bundle" not in sealed.about:
            raise InputError("it does not contain a bundle")
        yield read_about(sealed.about["bundle"]), sealed.tensors
    except MissingPartError as error:
        raise InputError(f"{path} can't be loaded: {error}") from error
    except Exception as error:  # a crafted bundle may raise anything
        raise InputError(
            f"{path} can't be used as a bundle ({error}): get it again from its source"
        ) from error


def base_about(
    module: nn.Module, build: str | None, args: Mapping[str, Any], carried: bool | None
) -> BaseAbout | None:
    """A bundle's metadata of the frozen parameters; None if there are none."""
    frozen = base_parameters(module)
    if not frozen:
        return None
    named = build.removeprefix(PREFIX) if build is not None and build.startswith(PREFIX) else None
    return BaseAbout(
        sha256=base_digest(module),
        parameters=sum(p.numel() for p in frozen.values()),
        carried=named is None if carried is None else carried,
        name=named,
        revision=args.get("revision") or revision_of(module),
    )


def _dtype_name(module: nn.Module) -> Any:
    parameter = next(module.parameters(), None)
    return str(parameter.dtype).removeprefix("torch.") if parameter is not None else "float32"
