"""The commands that bundle, inspect, adapt and apply models."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nufed.errors import InputError
from nufed.lab.cli.catalogue import complete_bundle, complete_method, complete_run
from nufed.lab.cli.options import AsJson, Trust
from nufed.lab.cli.terminal import console, print_table, say, table
from nufed.registry import is_code

if TYPE_CHECKING:
    from nufed.lab.bundle import Adapted, Prediction
    from nufed.lab.bundle.about import About
    from nufed.lab.readers.files import Data

MAX_PRINTED = 20  # predictions printed
TEXT = "text"  # the column of a table that models of transformers read

BundlePath = Annotated[Path, typer.Argument(help="A .nufed file.", autocompletion=complete_bundle)]
DataPath = Annotated[
    Path,
    typer.Argument(
        help="Samples: a .csv with a header, a .parquet, a .npz (inputs, targets), a .npy, or a "
        "folder with a folder of images per class; for models of several inputs a .npz with an "
        "array of each name, of texts a table with the column text."
    ),
]
Base = Annotated[
    str | None,
    typer.Option(help="Of a bundle that names its base model: the folder of that model."),
]
Label = Annotated[str, typer.Option(help="The column of a table that holds the label.")]
Targets = Annotated[
    Path | None, typer.Option(help="The .npy with the targets of inputs in a .npy.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file if it exists.")]


def bundle(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run directory; this method must be finished.", autocompletion=complete_run
        ),
    ],
    method: Annotated[
        str, typer.Option(help="The method to bundle.", autocompletion=complete_method)
    ],
    seed: Annotated[int | None, typer.Option(min=0, help="Its seed; default: the first.")] = None,
    agent: Annotated[
        int | None, typer.Option(min=0, help="Write this agent's personal model instead.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=0, help="With --agent: fine-tuning steps; default: as in the results."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The new .nufed file; with --agent a .safetensors."),
    ] = None,
    with_training_data: Annotated[
        bool,
        typer.Option(
            "--with-training-data",
            help="With --agent: allow a model that holds training data in some form (kNN-Per).",
        ),
    ] = False,
    with_base: Annotated[
        bool, typer.Option("--with-base", help="Also hold the weights of a pretrained base model.")
    ] = False,
    force: Force = False,
    trust: Trust = False,
) -> None:
    """Make a bundle: the global model with everything needed to adapt it.

    With --agent, one agent's personal model, for `nufed predict`.
    """
    from nufed.lab.bundle.bundle import SUFFIX
    from nufed.lab.bundle.from_run import make_bundle, make_personal
    from nufed.lab.runs.read_run import load_finished

    finished = load_finished(run, trust=trust)
    if agent is None:
        if steps is not None:
            raise InputError("--steps is for an agent's personal model: add --agent N")
        path = out or Path(f"{method}{SUFFIX}")
        _check_new(path, force)
        made = make_bundle(finished, method, seed, trust=trust, carry_base=with_base or None)
        made.save(path)
        say(f"bundle: {path} (show it with `nufed inspect {path}`)")
        return
    path = out or Path(f"{method}-agent-{agent}.safetensors")
    _check_model_file(path)
    _check_new(path, force)
    personal = make_personal(
        finished,
        method,
        agent,
        seed,
        steps=steps,
        trust=trust,
        with_training_data=with_training_data,
        carry_base=with_base or None,
    )
    personal.save(path)
    about = personal.about.personal
    if about is not None and about.training_data is not None:
        say(f"warning: {path} holds {about.training_data}: keep it where they may be")
    say(f"model: {path} (use it with `nufed predict {path} NEW_DATA`)")


def inspect(
    bundle: BundlePath, base: Base = None, trust: Trust = False, as_json: AsJson = False
) -> None:
    """Print a bundle's card, and check that its model can be built.

    Code that it names is imported only with --trust; the card is printed without it.
    """
    from rich.markdown import Markdown

    from nufed.lab.bundle import load_bundle
    from nufed.lab.bundle.bundle import read_card

    about, card = read_card(bundle)
    if as_json:
        print(json.dumps(about.model_dump(mode="json")))
    else:
        console().print(Markdown(card, hyperlinks=False))
    code = [name for name in (about.model.build, about.loss) if is_code(name)]
    if about.model.build is None or about.loss is None:
        say("its model was not built, which needs the object that it was made from", error=True)
    elif code and not trust:
        named = " and ".join(map(str, code))
        say(f"its model was not built, as that imports {named}: --trust allows it", error=True)
    else:
        load_bundle(bundle, trust=trust, base=base)


def adapt(
    bundle: BundlePath,
    data: DataPath,
    out: Annotated[Path, typer.Option(help="The model file to write, a .safetensors.")],
    steps: Annotated[
        str | None, typer.Option(help="Fine-tuning steps, or auto; default: the bundle's.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="With --steps auto: the largest number to try.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Step size of fine-tuning; default: the bundle's.")
    ] = None,
    label: Label = "label",
    targets: Targets = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the batches.")] = 0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Write the model even if adapting harms.")
    ] = False,
    base: Base = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Adapt a global model to your own data, and report the effect."""
    from nufed.lab.bundle import load_bundle
    from nufed.lab.runs.json_files import finite

    _check_model_file(out)
    _check_new(out, force)
    chosen = _steps(steps)
    if max_steps is not None and chosen != "auto":
        raise InputError(f"--max-steps {max_steps}: is for --steps auto; add that, or leave it out")
    loaded = load_bundle(bundle, trust=trust, base=base)
    given = _read(loaded.about, data, label, targets, base=base)
    adapted = loaded.adapt(
        given.inputs,
        given.labels,
        steps=chosen,
        max_steps=max_steps,
        lr=lr,
        seed=seed,
        anyway=anyway,
    )
    assert adapted.report is not None
    if adapted.report.refused:
        before, after = adapted.report.before.loss, adapted.report.after.loss
        raise InputError(
            f"adapting harms: on held-out samples the loss rises from {before:.3f} to {after:.3f}; "
            "nothing was written: try --steps auto or a smaller --lr, or write it with --anyway"
        )
    adapted.save(out)
    if as_json:
        report = {**asdict(adapted.report), "verdict": adapted.report.verdict}
        print(json.dumps({"model": str(out), "report": finite(report)}))
        return
    for line in adapted.report.words():
        say(line)
    further = f" --base {base}" if base else ""
    say(f"model: {out} (use it with `nufed predict {out} NEW_DATA{further}`)")


def predict(
    model: Annotated[
        Path, typer.Argument(help="A model from `nufed adapt` or `nufed bundle --agent`.")
    ],
    data: DataPath,
    out: Annotated[Path | None, typer.Option(help="Write all predictions to this .csv.")] = None,
    label: Label = "label",
    targets: Targets = None,
    base: Base = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Predict with an adapted model; if the data has labels, report the accuracy."""
    from nufed.lab.bundle import load_adapted

    if out is not None:
        _check_new(out, force)
    adapted = load_adapted(model, trust=trust, base=base)
    given = _read(adapted.about, data, label, targets, labelled=False, base=base)
    answers = adapted.predict(given.inputs)
    labels = _labels(adapted, given, len(answers))
    if out is not None:
        _write(out, answers, given.images)
    if as_json:
        print(json.dumps({"predictions": [a._asdict() for a in answers], "labels": labels}))
        return
    _print(answers, labels, given.images)
    if labels:
        right = sum(a.answer == label for a, label in zip(answers, labels, strict=True))
        say(f"right: {right} of {len(answers)}, {right / len(answers):.1%}")
    if out is not None:
        say(f"predictions: {out}")


def _check_model_file(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise InputError(f"--out {out}: its name must end in .safetensors")


def _check_new(out: Path, force: bool) -> None:
    if out.exists() and not force:
        raise InputError(f"{out} exists: give another --out, or --force to overwrite it")


def _read(
    about: About,
    data: Path,
    label: str,
    targets: Path | None,
    labelled: bool = True,
    base: str | None = None,
) -> Data:
    """A user's data: raw columns of a table, if the model takes them; texts or several arrays;
    images in its shape, as bytes or in 0 … 1."""
    from nufed.lab.readers.files import Data, named_file, read_data, read_several
    from nufed.lab.readers.tables import read_columns

    if targets is not None and (about.preparation is not None or about.names):
        raise InputError(f"--targets {targets}: this model takes targets in the file of its inputs")
    if about.names and data.suffix == ".npz":
        several = read_several(data, about.names, labelled)
        if not about.by_position:
            return several
        assert isinstance(several.inputs, Mapping)
        return several._replace(inputs=tuple(several.inputs[name] for name in about.names))
    if about.names:
        texts = read_columns(data, label, labelled)
        with named_file(data):
            if TEXT not in texts.columns:
                raise InputError(f"it has no column {TEXT!r}, with the texts that this model reads")
        return Data(about.tokens(texts.columns[TEXT], base), texts.labels)
    if about.preparation is not None:
        read = read_columns(data, label, labelled)
        with named_file(data):
            return Data(about.preparation.table(read.columns), read.labels)
    given = read_data(data, label, labelled, targets=targets, shape=about.inputs.shape)
    if given.images and about.inputs.dtype.startswith("float"):
        pixels: Any = given.inputs
        return given._replace(inputs=pixels / 255)
    return given


def _steps(text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == "auto":
        return None if text is None else "auto"
    if not text.isdecimal():
        raise InputError(f"--steps {text}: must be a whole number, 0 or more, or auto")
    return int(text)


def _labels(adapted: Adapted, given: Data, inputs: int) -> list[str]:
    """The class names of the data's labels; empty without labels or classes."""
    classes = adapted.about.classes
    if given.labels is None or not classes:
        return []
    numbers = adapted.about.read_targets(given.labels).tolist()
    if len(numbers) != inputs:
        raise InputError(f"there are {inputs} inputs and {len(numbers)} labels")
    return [classes[number] for number in numbers]


def _cells(name: str, prediction: Prediction) -> list[str]:
    answer = prediction.answer
    words = answer if isinstance(answer, str) else " ".join(f"{x:.6g}" for x in answer)
    sure = "" if prediction.probability is None else f"{prediction.probability:.3f}"
    return [name, words, sure]


def _print(answers: list[Prediction], labels: list[str], names: Sequence[str]) -> None:
    titles = ["sample", "answer", "probability", *(["label", ""] if labels else [])]
    names = names or [str(number) for number in range(len(answers))]
    rows = [_cells(*pair) for pair in list(zip(names, answers, strict=True))[:MAX_PRINTED]]
    if labels:
        for cells, answer, label in zip(rows, answers, labels, strict=False):
            cells += [label, "" if label == answer.answer else "wrong"]
    print_table(table(rows, titles))
    if len(answers) > MAX_PRINTED:
        say(f"… {len(answers) - MAX_PRINTED} more: --out predictions.csv writes all of them")


def _write(out: Path, answers: list[Prediction], names: Sequence[str] = ()) -> None:
    from nufed.lab.files import write_durably
    from nufed.lab.readers.files import to_cell

    if out.suffix != ".csv":
        raise InputError(f"--out {out}: its name must end in .csv")
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["sample", "answer", "probability"])
    names = names or [str(number) for number in range(len(answers))]
    for name, prediction in zip(names, answers, strict=True):
        sample, answer, sure = _cells(name, prediction)
        is_class = isinstance(prediction.answer, str)
        writer.writerow([to_cell(sample), to_cell(answer) if is_class else answer, sure])
    write_durably(out, text.getvalue().encode())
