"""Logs of a federation's server and sites: a line for each event, as text or as JSON Lines.

A JSON line has ``time`` (ISO 8601, UTC), ``level``, ``message`` and the event's own fields, such as
``round`` or ``seconds``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias, cast

from nufed.errors import InputError, shown, visible
from nufed.lab.files import cannot_write

LOG = logging.getLogger("nufed")
LogFormat: TypeAlias = Literal["text", "json"]
LOG_FILES: dict[str, str] = {"text": "log.txt", "json": "log.jsonl"}
TEXT = "%(asctime)s %(levelname)s %(message)s"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_FLOWERS = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s*(.*)")
_MESSAGE_ID = re.compile(r" ?\(?(message )?(ID|id)[:=] ?[0-9a-f]{64}\)?")


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": without_codes(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Text(logging.Formatter):
    """Formats a record as text without terminal codes."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (of the base class)
        record.message = without_codes(record.message)
        return super().formatMessage(record)


def event(message: str, *values: object, **fields: object) -> None:
    """Log an event; ``fields`` are in JSON lines only."""
    LOG.info(message, *values, extra={"fields": fields})


def as_format(form: object) -> LogFormat:
    """The log format with this name."""
    if form not in LOG_FILES:
        raise InputError(f"log-format = {shown(form)}: must be one of {', '.join(LOG_FILES)}")
    return cast(LogFormat, form)


def formatter(form: object) -> logging.Formatter:
    """The formatter of a log format."""
    return JsonLines() if as_format(form) == "json" else _Text(TEXT)


@contextmanager
def log_to(folder: Path, form: str) -> Iterator[None]:
    """Also write the log to a file of the folder."""
    chosen = formatter(form)
    path = folder / LOG_FILES[form]
    try:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise cannot_write(path, error) from error
    handler.setFormatter(chosen)
    before = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.setLevel(before)
        LOG.removeHandler(handler)
        handler.close()


def log_to_stderr(form: object) -> None:
    """Write the log of this process, and Flower's warnings, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(form))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    flowers = logging.getLogger("flwr")
    flowers.handlers = [handler]
    flowers.setLevel(logging.WARNING)


def without_codes(text: str) -> str:
    r"""Text without terminal codes and Flower's message ids, on one line.

    >>> without_codes("\x1b[92mINFO \x1b[0m: Sent (ID: " + 64 * "0" + ")")
    'INFO : Sent'
    """
    return visible(_MESSAGE_ID.sub("", _ANSI.sub("", text)))


def relayed(line: str, form: str) -> str | None:
    """A line that one of Flower's processes printed, in a log format; None for an empty one."""
    text = without_codes(line.rstrip())
    match = _FLOWERS.fullmatch(text)
    level, message = match.groups() if match else ("INFO", text)
    if not message.strip():
        return None
    number = logging.getLevelNamesMapping()[level]
    record = logging.LogRecord("flwr", number, "", 0, message, None, None)
    return formatter(form).format(record) if form == "json" or match else text
