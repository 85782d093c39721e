"""Pretrained models of transformers, and adapters of peft (LoRA).

A model is read from a local folder, or from the local cache of Hugging Face: nothing is downloaded
unless the user asks for it (:func:`download`), only safetensors files are read, and no code that
comes with a model is run.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from nufed.errors import InputError, in_short, require, shown
from nufed.models.trainable import ADAPTERS, train_only
from nufed.objective.modules import logits_of

PREFIX = "hf:"  # in model.name
TASKS = {
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "causal": "AutoModelForCausalLM",
}
Task = Literal["sequence", "token", "causal"]
FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # of a model that is downloaded


def pretrained(
    name: str, outputs: int, task: Task = "sequence", revision: str | None = None, **settings: Any
) -> nn.Module:
    """A pretrained model with a head for ``outputs`` classes, whose weights are drawn by torch.

    Args:
        name: a folder, or the name of a model in the local cache of Hugging Face.
        outputs: number of classes; a causal language model has those of its vocabulary.
        task: ``"sequence"`` and ``"token"`` classification, or ``"causal"`` language modelling.
        revision: a commit, tag or branch of a model in the cache.
        settings: of the model's configuration, such as ``hidden_dropout_prob``.
    """
    require(task in TASKS, "model.args.task", task, f"must be one of {', '.join(TASKS)}")
    require(bool(name), "model.name", PREFIX, "must name a folder or a cached model, as hf:NAME")
    transformers = _transformers()
    place: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if revision is not None:
        place["revision"] = revision
    if task != "causal":
        settings = {**settings, "num_labels": outputs}
    with _quietly(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(name, **place)
            for key, value in settings.items():
                known = hasattr(config, key)
                require(known, f"model.args.{key}", value, "is no setting of this model")
                setattr(config, key, value)
            kind = getattr(transformers, TASKS[task])
            model, about = kind.from_pretrained(
                name, config=config, use_safetensors=True, output_loading_info=True, **place
            )
        except InputError:
            raise
        except Exception as error:  # transformers may raise anything
            raise InputError(_unusable(name, error)) from error
    # transformers loads models for evaluation, in which layers would stay
    return WithoutPadding(model.train(), about["missing_keys"])


def architecture_of(module: nn.Module) -> dict[str, Any] | None:
    """The configuration of a model of transformers, from which it can be built; else None."""
    if not isinstance(module, WithoutPadding):
        return None
    model: Any = module.model
    settings: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {key: value for key, value in settings.items() if key != "_name_or_path"}


def revision_of(module: nn.Module) -> str | None:
    """The commit of a model that came from the local cache."""
    config = getattr(getattr(module, "model", None), "config", None)
    return getattr(config, "_commit_hash", None)


def with_architecture(architecture: Mapping[str, Any], task: Task = "sequence") -> nn.Module:
    """A model of transformers with this configuration, whose weights are random."""
    require(task in TASKS, "model.args.task", task, f"must be one of {', '.join(TASKS)}")
    transformers = _transformers()
    settings = dict(architecture)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    return WithoutPadding(getattr(transformers, TASKS[task]).from_config(config))


def tokens(
    texts: Sequence[str], name: str, length: int = 64, *, trim: bool = True
) -> dict[str, Tensor]:
    """The inputs of a pretrained model for some texts, cut or padded to ``length`` tokens.

    Args:
        texts: one for every sample.
        name: a folder, or the name of a model in the local cache, with its tokenizer.
        length: tokens of a text at most.
        trim: leave out what is padding in all texts.
    """
    transformers = _transformers()
    with _quietly(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
        except Exception as error:  # transformers may raise anything
            raise InputError(_unusable(name, error)) from error
    if tokenizer.pad_token is None:
        raise InputError(
            f"the tokenizer of {shown(name)} has no padding token, so that texts of different "
            "lengths can't be in one batch: set pad_token in its tokenizer_config.json, for "
            "example to its end-of-text token"
        )
    tokenizer.padding_side = "right"  # where WithoutPadding removes it
    padded = {"padding": "max_length", "truncation": True, "max_length": length}
    encoded = tokenizer(list(texts), return_tensors="pt", **padded)
    longest = int(encoded["attention_mask"].sum(dim=1).max()) if trim else length
    return {key: value[:, :longest] for key, value in encoded.items()}


class WithoutPadding(nn.Module):
    """Calls a model without the columns that are padding in the whole batch.

    Inputs are padded to one length once, and ``attention_mask`` says what is padding. Outputs for
    every token are padded with zeros again. A single input is the model's main one, such as
    ``input_ids``.

    Args:
        model: a model of transformers.
        drawn: the names of its parameters that were not pretrained, such as those of a new head.
    """

    def __init__(self, model: nn.Module, drawn: Iterable[str] = ()) -> None:
        super().__init__()
        self.model = model
        self.drawn = frozenset(f"model.{name}" for name in drawn)

    def forward(self, *arrays: Tensor, **inputs: Tensor) -> Tensor:
        mask = inputs.get("attention_mask")
        if mask is None:
            return logits_of(self.model(*arrays, **inputs))
        used = mask.any(dim=0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        logits = logits_of(self.model(**{name: x[:, :length] for name, x in inputs.items()}))
        return logits if logits.ndim == 2 else F.pad(logits, (0, 0, 0, mask.shape[1] - length))


def add_adapters(
    module: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    *,
    freeze_a: bool = False,
    head: bool = True,
) -> nn.Module:
    """Add low-rank adapters to layers and freeze everything but these: W + (alpha / rank)·B·A.

    Hu et al. 2021 (LoRA). A starts at random and B at 0, so that the model is unchanged at first.

    Args:
        module: changed in place.
        rank: columns of B.
        alpha: scale of the adapters.
        targets: names, or ends of names, of linear layers; none: those that peft knows for this
            kind of model.
        freeze_a: train B only (FFA-LoRA, Sun et al. 2024): the mean of the agents' B·A is then the
            product of the mean B with A.
        head: train the last layer, too, unless it shares its weight with an embedding.
    """
    peft = _peft()
    sides = [min(m.weight.shape) for m in module.modules() if type(m) is nn.Linear]
    most = max(sides, default=rank)
    require(rank <= most, "model.lora.rank", rank, f"must be at most {most}, as its layers are")
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": list(targets) or None}
    inner = module.model if isinstance(module, WithoutPadding) else module
    every = list(module.named_parameters(remove_duplicate=False))
    last = every[-1][0].rpartition(".")[0]
    of_last = {id(p) for p in module.get_submodule(last).parameters()}
    tied = len([p for _, p in every if id(p) in of_last]) > len(of_last)
    try:
        with warnings.catch_warnings():
            # peft sets it itself for the transposed layers of GPT-2
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            peft.inject_adapter_in_model(peft.LoraConfig(**settings), inner)
    except ValueError as error:
        linear = {n.rpartition(".")[2] for n, m in module.named_modules() if type(m) is nn.Linear}
        raise InputError(
            f"model.lora.targets = {shown(list(targets))}: no layer can be adapted "
            f"({in_short(error)}); this model has linear layers called "
            f"{', '.join(sorted(linear)) or 'nothing'}"
        ) from error
    names = [n for n, _ in module.named_parameters() if ADAPTERS in n]
    trained = [n for n in names if not (freeze_a and "lora_A" in n)]
    train_only(module, ",".join([*trained, *([f"{last}.*"] if head and not tied else [])]))
    return module


@contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Without progress bars and notes on weights that are new."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def _unusable(name: str, error: Exception) -> str:
    """Why a pretrained model can't be loaded, and what to do."""
    if Path(name).is_dir():
        return f"the folder {name} holds no usable pretrained model ({in_short(error)})"
    return (
        f"the pretrained model {shown(name)} is neither a folder nor in the local cache: run "
        f"`nufed data get hf:{name}` to download it ({in_short(error)})"
    )


def download(name: str, revision: str | None = None) -> Path:
    """Download a pretrained model into the local cache of Hugging Face; resumes if interrupted."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except Exception as error:  # the network, a missing repository, no permission …
        raise InputError(
            f"{shown(name)} can't be downloaded from Hugging Face ({in_short(error)}): check the "
            "name and the connection, and try again"
        ) from error


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import transformers
    except ImportError:
        raise InputError(
            'a pretrained model needs transformers: install it with pip install "nufed[hf]"'
        ) from None
    return transformers


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InputError('LoRA needs peft: install it with pip install "nufed[peft]"') from None
    return peft
