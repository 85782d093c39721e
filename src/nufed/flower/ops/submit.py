"""Submits an app, follows its log and reports its outcome."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nufed.errors import InputError, RunError, TrainingError
from nufed.flower.logs import LOG_FILES, LogFormat
from nufed.flower.ops.flower_processes import Flower, flower, wait
from nufed.flower.ops.keys import link_expiry
from nufed.flower.ops.link import NAME, Link, flwr_json
from nufed.flower.ops.prometheus import run_metrics, serving
from nufed.flower.ops.superlink import is_listening
from nufed.lab.runs.directory import RunDirectory
from nufed.lab.runs.federation_records import read_status
from nufed.lab.runs.json_files import check_entries, read_record
from nufed.lab.runs.records import Failure

Say = Callable[[str], None]
SERVER_TIMEOUT = 60.0  # seconds that a run waits for a server that is starting


class Stopped(KeyboardInterrupt):
    """The run was stopped by Ctrl-C or SIGTERM; the message says how to resume."""


@dataclass(frozen=True)
class Monitoring:
    """Monitoring of a run: the format of its log, and the loopback port of its metrics, if any."""

    log_format: LogFormat = "text"
    metrics_port: int | None = None


def run_app(
    app: Path, out: Path, link: Link, say: Say, monitoring: Monitoring = Monitoring()
) -> Path:
    """Run an app on a federation; returns the path of the report, or raises with the reason."""
    wait_for_server(link, say)
    for warning in link_expiry(link):
        say(warning)
    with flower() as commands:
        link.connect(commands)
        resume_command = f"nufed federate run {app} --resume {out} {link.options}"
        return follow(commands, app, out, say, resume_command, monitoring=monitoring)


def wait_for_server(link: Link, say: Say, seconds: float = SERVER_TIMEOUT) -> None:
    """Wait until something listens at the server's address."""
    host, _, port = link.address.rpartition(":")
    if is_listening(host, int(port)):
        return
    say(f"nothing listens at {link.address}: waiting up to {seconds:g} seconds for the server")
    if not wait(lambda: is_listening(host, int(port)), seconds):
        raise RunError(
            f"nothing listens at {link.address} after {seconds:g} seconds: start the server with "
            "`nufed federate server`, or give its HOST:PORT as --server"
        )


def run_directory(app: Path, out: Path | None, resume: Path | None) -> Path:
    """The validated run directory: a new one, or that of a run to resume."""
    check_app(app)
    if out is not None and resume is not None:
        raise InputError("--out and --resume exclude each other: give one of them")
    if resume is not None:
        if not (resume / "run.json").is_file():
            raise InputError(
                f"--resume {resume}: not a run directory, it has no run.json; give another, or "
                "start a new run with --out"
            )
        check_entries(resume)
        return resume
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"--out {out}: exists and is not empty; give another, or --resume {out} to resume it"
        )
    return RunDirectory.create(app.resolve().name, out).path


def check_app(app: Path) -> None:
    if not (app / "pyproject.toml").is_file():
        raise InputError(f"{app} is not an app directory: it has no pyproject.toml")


def follow(
    commands: Flower,
    app: Path,
    out: Path,
    say: Say,
    resume_command: str,
    on_poll: Callable[[], None] = lambda: None,
    monitoring: Monitoring = Monitoring(),
) -> Path:
    """Run an app on the connected SuperLink, following its log.

    ``resume_command`` is the command that resumes it; ``on_poll`` is called while it runs.
    """
    form = monitoring.log_format
    with serving(monitoring.metrics_port, lambda: run_metrics(read_status(out))):
        log = Tail(out / LOG_FILES[form])
        show = say if form == "text" else print  # JSON lines on standard output
        place = f"out={quoted(str(out.resolve()), '--out')}"
        if form != "text":
            check_option(app, "log-format")
            place += f" log-format={quoted(form, '--log-format')}"
        old = failures(out)
        try:
            run = flwr_json(commands, "run", str(app), NAME, "--run-config", place)["run-id"]
        except RunError as error:
            raise RunError(f"the run could not be submitted: {error}") from None
        say(f"submitted run {run}; run directory: {out}")
        try:
            status, details = "running", ""
            while not status.startswith("finished"):  # a log stream may end before its run
                stream = commands.start(
                    "flwr", "log", run, NAME, "--stream", log=commands.home / "log"
                )
                while stream.poll() is None:
                    log.show(show)
                    on_poll()
                    time.sleep(0.5)
                status, details = status_of(commands, run)
        except KeyboardInterrupt:
            say("stopping the run …")
            commands.call("flwr", "stop", run, NAME, seconds=60)
            raise Stopped(f"stopped. {_how_to_resume(out, resume_command)}") from None
        log.show(show)
        reasons = [reason for reason in failures(out) if reason not in old]
        if status == "finished:completed" and not reasons:
            return report_of(out)
        why = "; ".join(reason for _, _, reason in reasons) or details or f"it is {status}"
        how = _how_to_resume(out, resume_command, "Once that is corrected, resume with")
        raise TrainingError(f"the run failed: {why.rstrip('.')}. {how}")


def check_option(app: Path, key: str) -> None:
    """Refuse a setting that Flower would refuse: an app's pyproject.toml must declare it."""
    path = app / "pyproject.toml"
    try:
        declared = tomllib.loads(path.read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError):
        declared = {}
    if key not in declared:
        raise InputError(
            f'{path} has no {key} under [tool.flwr.app.config]: add the line {key} = "text" there'
        )


def _how_to_resume(out: Path, resume_command: str, words: str = "Resume with") -> str:
    if (out / "run.json").is_file():
        return f"{words}: {resume_command}"
    return "Nothing was saved yet: start it again"


def status_of(commands: Flower, run: str) -> tuple[str, str]:
    """A run's status, and Flower's details of it."""
    try:
        (listed,) = flwr_json(commands, "list", NAME, "--run-id", run)["runs"]
    except RunError as error:
        return "finished:lost", f"the server lost the run, or is unreachable: {error}"
    return listed["status"], listed["status-details"]


def failures(out: Path) -> list[tuple[Path, int, str]]:
    """Recorded failures of methods: file, modification time, reason."""
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
        f"the run completed, but {out} is empty: its files are on the server's machine; start "
        "`nufed federate run` there"
    )


class Tail:
    """Shows lines appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = path.stat().st_size if path.exists() else 0

    def show(self, say: Say) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._seen)
            whole, end, _ = file.read().rpartition(b"\n")  # keep an incomplete line for later
        self._seen += len(whole + end)
        for line in whole.decode("utf-8", "replace").splitlines():
            say(line)


def quoted(text: str, what: str) -> str:
    """A string quoted for Flower's config syntax."""
    if "'" in text or not text.isprintable():
        raise InputError(f"{what} {text!r}: must contain neither ' nor line breaks")
    return f"'{text}'"
