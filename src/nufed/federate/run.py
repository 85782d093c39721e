"""Submits an app, follows it, says how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from nufed.errors import InputError, RunError, TrainingError
from nufed.federate.link import NAME, Link, ask
from nufed.federate.processes import Flower, flower
from nufed.federate.site import quoted
from nufed.runs.directory import RunDirectory
from nufed.runs.files import check_entries, read_record
from nufed.runs.records import Failure

Say = Callable[[str], None]


class Stopped(KeyboardInterrupt):
    """The run was stopped by Ctrl-C or SIGTERM; the message says how to go on."""


def run_app(app: Path, out: Path, link: Link, say: Say) -> Path:
    """Run an app on a federation; the path of the report, or an error with the one reason."""
    with flower() as commands:
        link.connect(commands)
        again = f"nufed federate run {app} --resume {out} {link.options}"
        return follow(commands, app, out, say, again)


def run_directory(app: Path, out: Path | None, resume: Path | None) -> Path:
    """Where the run is to be written, checked: a new directory, or that of a run to go on with."""
    check_app(app)
    if out is not None and resume is not None:
        raise InputError("--out and --resume exclude each other: give one of them")
    if resume is not None:
        if not (resume / "run.json").is_file():
            raise InputError(
                f"--resume {resume}: no run was begun there, it has no run.json; give another, or "
                "start one with --out"
            )
        check_entries(resume)
        return resume
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"--out {out}: is there and not empty; give another, or --resume {out} to go on with it"
        )
    return RunDirectory.create(app.resolve().name, out).path


def check_app(app: Path) -> None:
    if not (app / "pyproject.toml").is_file():
        raise InputError(f"{app} is not an app's directory: it has no pyproject.toml")


def follow(
    commands: Flower,
    app: Path,
    out: Path,
    say: Say,
    again: str,
    look: Callable[[], None] = lambda: None,
) -> Path:
    """Run an app where ``commands`` is connected to, showing its log as it grows.

    ``again`` is the command that goes on with it; ``look`` is called while it runs.
    """
    log, place = Tail(out / "log.txt"), f"out={quoted(str(out.resolve()), '--out')}"
    old = failures(out)
    try:
        run = ask(commands, "run", str(app), NAME, "--run-config", place)["run-id"]
    except RunError as error:
        raise RunError(f"the run could not be submitted: {error}") from None
    say(f"run {run} was submitted; its directory is {out}")
    try:
        status, details = "running", ""
        while not status.startswith("finished"):  # a stream may also end before its run
            stream = commands.start("flwr", "log", run, NAME, "--stream", log=commands.home / "log")
            while stream.poll() is None:
                log.show(say)
                look()
                time.sleep(0.5)
            status, details = state_of(commands, run)
    except KeyboardInterrupt:
        say("stopping the run …")
        commands.call("flwr", "stop", run, NAME, seconds=60)
        raise Stopped(f"stopped. {_what_next(out, again)}") from None
    log.show(say)
    reasons = [reason for reason in failures(out) if reason not in old]
    if status == "finished:completed" and not reasons:
        return report_of(out)
    why = "; ".join(reason for _, _, reason in reasons) or details or f"it is {status}"
    raise TrainingError(f"the run failed: {why.rstrip('.')}. {_what_next(out, again)}")


def _what_next(out: Path, again: str) -> str:
    if (out / "run.json").is_file():
        return f"Go on with: {again}"
    return "Nothing was saved yet: start it again"


def state_of(commands: Flower, run: str) -> tuple[str, str]:
    """A run's status, and what Flower says about it."""
    try:
        (found,) = ask(commands, "list", NAME, "--run-id", run)["runs"]
    except RunError as error:
        return "finished:lost", f"the server does not know it any more, or is gone: {error}"
    return found["status"], found["status-details"]


def failures(out: Path) -> list[tuple[Path, int, str]]:
    """Where and when it was written down why a method had to stop, and why."""
    return [
        (path, path.stat().st_mtime_ns, read_record(path, Failure).reason)
        for path in sorted(out.glob("methods/*/seed-*/failure.json"))
    ]


def report_of(out: Path) -> Path:
    """The path of a finished run's report."""
    if (out / "report.html").is_file():
        return out / "report.html"
    if any(out.glob("methods/*/seed-*/done.json")):
        return out
    raise RunError(
        f"the run ended well, but nothing is in {out}: it is on the server's machine, where "
        "`nufed federate run` is best started"
    )


class Tail:
    """The lines that are appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = path.stat().st_size if path.exists() else 0

    def show(self, say: Say) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._seen)
            whole, end, _ = file.read().rpartition(b"\n")  # a half line waits for its end
        self._seen += len(whole + end)
        for line in whole.decode("utf-8", "replace").splitlines():
            say(line)
