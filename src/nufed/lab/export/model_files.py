"""Models for use without nufed: as ONNX, and as a plain state_dict."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nufed.errors import InputError, in_short, shown
from nufed.lab.bundle import Adapted, load_adapted, load_bundle
from nufed.lab.bundle.from_run import make_bundle
from nufed.lab.export.target import Chosen, check_new, needed
from nufed.lab.files import tensor_pieces, unseal, write_durably
from nufed.lab.runs import Run
from nufed.lab.runs.json_files import write_json

ONNX, STATE_DICT = ".onnx", ".safetensors"


def write_onnx(model: Adapted, out: Path) -> list[str]:
    """Write a model with its preprocessing: raw inputs in, outputs (logits of classes) out.

    The batch size is free. Class names are in the file's metadata (``classes``, a JSON list).
    """
    _check_module(model)
    check_new(out, ONNX)
    with needed("writing ONNX files", "onnx"):
        import onnx
        import onnxscript  # noqa: F401
    if model.about.names:
        raise InputError(
            f"this model takes several inputs ({', '.join(model.about.names)}), which is not "
            "written as ONNX: use --to state_dict"
        )
    example = model.about.zeros(2)
    try:
        with _quiet():
            program = torch.onnx.export(
                model.module,
                (example,),
                dynamic_shapes=({0: "samples"},),
                input_names=["inputs"],
                output_names=["outputs"],
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the user's model may use anything
        raise InputError(
            f"this model can't be written as ONNX ({in_short(error)}): use --to state_dict"
        ) from error
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {k: json.dumps(v) for k, v in _about(model).items()})
    write_durably(out, proto.SerializeToString())
    return [f"model: {out} (inputs: {_inputs(model)})"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's own warnings, also about packages that it lacks."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def write_state_dict(model: Adapted, out: Path) -> list[str]:
    """Write the module's parameters and buffers by name, and a JSON file with the class names,
    the format of inputs, and how the module is built."""
    _check_module(model)
    check_new(out, STATE_DICT)
    about = out.with_suffix(".json")
    check_new(about, ".json")
    state = model.module.get_submodule("model").state_dict()
    write_durably(out, tensor_pieces(state, {"format": "pt"}))
    write_json(about, _about(model))
    return [f"state_dict: {out}", f"classes and format of inputs: {about}"]


WRITERS: dict[str, tuple[Callable[[Adapted, Path], list[str]], str]] = {
    "onnx": (write_onnx, ONNX),
    "state_dict": (write_state_dict, STATE_DICT),
}


def export_model(
    path: Path, to: str, out: Path | None, *, trust: bool = False, base: str | None = None
) -> list[str]:
    """Write a bundle or an adapted model for use without nufed.

    Args:
        path: the file of a bundle or of an adapted model.
        to: "onnx" or "state_dict".
        out: the file to write; by default the name of ``path`` with another ending.
        trust: allow importing the code that the file names to build its model, if any.
        base: as for :func:`nufed.load_bundle`.
    """
    if to not in WRITERS:
        raise InputError(
            f"--to {shown(to)}: {path} is a file, so {' or '.join(WRITERS)}; other targets take a "
            "run directory"
        )
    write, suffix = WRITERS[to]
    return write(load_model(path, trust=trust, base=base), out or Path(f"{path.stem}{suffix}"))


def export_of_run(to: str, run: Run, out: Path, chosen: Chosen) -> list[str]:
    """Write the global model of a method of a run."""
    if chosen.method is None and len(run.methods) > 1:
        raise InputError(f"--to {to} writes one model: add --method, {' or '.join(run.methods)}")
    method = chosen.method or next(iter(run.methods))
    bundle = make_bundle(run, method, chosen.seed, trust=chosen.trust)
    return WRITERS[to][0](bundle.unadapted(), out)


def load_model(path: Path, *, trust: bool = False, base: str | None = None) -> Adapted:
    """The model of a file: adapted, or a bundle's global model."""
    try:
        is_bundle = "bundle" in unseal(path.read_bytes()).about
    except Exception as error:  # a foreign file may raise anything
        raise InputError(
            f"{path} can't be read as a bundle or an adapted model ({in_short(error)})"
        ) from error
    if is_bundle:
        return load_bundle(path, trust=trust, base=base).unadapted()
    return load_adapted(path, trust=trust, base=base)


def _check_module(model: Adapted) -> None:
    if model.about.personal is not None:
        raise InputError(
            f"this personal model is more than a module: {shown(model.about.personal.algorithm)} "
            "predicts with further tensors, so only nufed can use it (`nufed predict`)"
        )


def _about(model: Adapted) -> dict[str, Any]:
    """Metadata for users without nufed."""
    about = model.about
    return {
        "name": about.name,
        "classes": about.classes,
        "inputs": {name: one.model_dump() for name, one in about.formats.items()}
        or about.inputs.model_dump(),
        "outputs": "logits, in the order of classes" if about.classes else "predicted numbers",
        "dtype": about.dtype,
        "build": about.model.build,
        "args": about.model.args,
        "made_by": f"nufed {about.nufed}",
    }


def _inputs(model: Adapted) -> str:
    inputs = model.about.inputs
    return f"{inputs.dtype} of shape {('samples', *inputs.shape)}".replace("'", "")
