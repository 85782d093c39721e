"""JSON files of a run directory: written, and read strictly.

Invalid content is refused in one sentence that names the file (:func:`checked`), and so are links
and special files (:func:`check_entries`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
)

from nufed.errors import RunError, shown
from nufed.lab.files import read_sealed, write_durably

Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def or_nan(value: float | None) -> float:
    """A number of a JSON file, where non-finite ones are written as null."""
    return math.nan if value is None else value


Number = Annotated[float | None, AfterValidator(or_nan)]
Numbers = list[Number]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Schema(Protocol[T_co]):
    """A :class:`Record`, or a :class:`DataclassJson`."""

    def model_validate_json(self, json_data: str | bytes) -> T_co: ...


class Record(BaseModel):
    """A JSON object with exactly these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def record(self) -> dict[str, Any]:
        """The record as plain data for JSON."""
        plain: dict[str, Any] = finite(self.model_dump())
        return plain


class DataclassJson(Generic[T]):
    """A dataclass of the core as a JSON object, which is read strictly.

    Args:
        cls: the dataclass. In JSON its tuples are lists, and its non-finite numbers null.
        omitted: fields that are not written.
        check: raises a ValueError if fields contradict each other.
        limits: narrower types of some fields.
    """

    def __init__(
        self,
        cls: type[T],
        *,
        omitted: Collection[str] = (),
        check: Callable[[T], None] = lambda value: None,
        **limits: Any,
    ) -> None:
        hints = get_type_hints(cls)
        self._fields = [f for f in dataclasses.fields(cast(Any, cls)) if f.name not in omitted]
        schema: dict[str, Any] = {
            f.name: (
                limits.get(f.name) or _json_type(hints[f.name]),
                ... if f.default is dataclasses.MISSING else f.default,
            )
            for f in self._fields
        }
        model = create_model(cls.__name__, __base__=Record, **schema)

        def made(record: Record) -> T:
            value = cls(**dict(record))
            check(value)
            return value

        self.schema = Annotated[model, AfterValidator(made)]
        self._adapter: TypeAdapter[T] = TypeAdapter(cast(Any, self.schema))

    def model_validate_json(self, json_data: str | bytes) -> T:
        """The dataclass; raises pydantic's ValidationError, as a :class:`Record` does."""
        return self._adapter.validate_json(json_data)

    def record(self, value: T) -> dict[str, Any]:
        """The record as plain data for JSON."""
        plain = dataclasses.asdict(cast(Any, value))
        return {field.name: plain[field.name] for field in self._fields}


def _json_type(hint: Any) -> Any:
    """The type of a field in JSON: a count where the dataclass has an int, null for NaN."""
    if hint in (int, float):
        return Whole if hint is int else Number
    if dataclasses.is_dataclass(hint):
        return DataclassJson(cast(type[Any], hint)).schema
    if get_origin(hint) is tuple:
        kinds = [kind if kind is ... else _json_type(kind) for kind in get_args(hint)]
        return tuple.__class_getitem__(tuple(kinds))
    return hint


def require_fit(ok: bool, message: str) -> None:
    """Raise a ValueError, in a validator, unless fields fit together."""
    if not ok:
        raise ValueError(message)


def checked(schema: Schema[T], content: Any, path: Path, line: int | None = None) -> T:
    """The content of a file as a record, or an error that names the file and the invalid key.

    ``content`` is JSON as bytes, or already decoded. The latter is encoded again, because Python,
    unlike pydantic, accepts lone surrogates, which can't be encoded in the report.
    """
    try:
        text = content if isinstance(content, bytes) else json.dumps(content)
        return schema.model_validate_json(text)
    except RecursionError:
        raise RunError(f"{path} is invalid: it is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = shown(".".join(map(str, first["loc"])))[1:-1]
        where = f"{path}" if line is None else f"{path}, line {line}"
        raised = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"]
        reason = str(raised).splitlines()[0]
        raise RunError(f"{where} is invalid: {key}{': ' if key else ''}{reason}") from None


def check_entries(path: Path) -> None:
    """Refuse a run directory that contains anything but directories and regular files.

    Symbolic and hard links redirect reads and writes; FIFOs, sockets and devices block or have side
    effects. Nufed creates none of them, and this opens nothing. The path itself may be a link,
    because the user gave it.
    """
    for entry in path.rglob("*"):
        try:
            about = entry.lstat()
        except FileNotFoundError:  # removed meanwhile by a process that trains a part of the run
            continue
        except OSError as error:
            raise RunError(f"{entry} can't be read: {error.strerror}") from error
        mode, advice = about.st_mode, "remove it"
        if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and about.st_nlink == 1):
            continue
        kind = "special file (a FIFO, socket or device)"
        if stat.S_ISLNK(mode) or stat.S_ISREG(mode):
            kind = "symbolic link" if stat.S_ISLNK(mode) else "hard link to another file"
            advice = (
                f"if you trust its target, copy the run with `cp -RL {path} COPY` and use the copy"
            )
        raise RunError(
            f"{entry} is a {kind}; a run directory may contain only directories and regular files: "
            f"{advice}"
        )


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON; non-finite values become null."""
    text = json.dumps(finite(value), indent=1, allow_nan=False) + "\n"
    write_durably(path, text.encode())


def read_lines(path: Path, schema: Schema[T]) -> list[T]:
    """The records of a JSON Lines file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from error
    return [checked(schema, line, path, number) for number, line in enumerate(lines, start=1)]


def valid_lines(path: Path, schema: Schema[T]) -> list[T]:
    """The records of a JSON Lines file, if there is one, without damaged or truncated lines."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(RunError):
            records.append(checked(schema, line, path))
    return records


def check_format(path: Path, written: object, read: int) -> None:
    """Refuse a file of another format than this version of nufed reads."""
    if written != read:
        raise RunError(
            f"{path} has format {shown(written)}, and this nufed reads {read}: use the version "
            "that wrote it"
        )


def finite(value: Any) -> Any:
    """The value with every non-finite number replaced by None, as JSON requires."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def read_record(path: Path, schema: Schema[T]) -> T:
    """The JSON of a sealed file, as a record."""
    return checked(schema, read_about(path), path)


def read_about(path: Path) -> dict[str, Any]:
    """The JSON of a sealed file."""
    try:
        return read_sealed(path).about
    except RunError as error:
        raise RunError(f"{error}: restore it from a backup, or start a new run") from error
