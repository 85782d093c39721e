"""Serves the report of a run on this machine's loopback interface, read only.

Of a run that is still training it has the curves so far, and the results of what is done. It reads
the run's files, takes no lock and writes nothing. One page is served, at a path with a secret that
is shown to its user only, since other users of the machine can connect, too. Requests that name
another host are refused: a foreign web site could have pointed its name here.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Iterator
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from math import nan
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import cast

from nufed.errors import InputError, RunError, visible
from nufed.lab.report.charts import rounds_chart
from nufed.lab.report.page import Charts, Page, Section, Text, Warned, caption
from nufed.lab.report.run_page import run_page
from nufed.lab.report.tables import Table, number_format, results_table
from nufed.lab.runs.frames import signals
from nufed.lab.runs.json_files import or_nan
from nufed.lab.runs.read_run import PartState, TrainingState, training_state, version_of


def watched_page(state: TrainingState) -> bytes:
    """The report of a run if it is finished, else what exists so far, as a page in UTF-8."""
    if state.finished:
        return run_page([state.run]).render()[0]
    run, so_far = state.run, state.with_rounds_so_far()
    groups = _groups(state)
    score = f"{run.config.eval_on.capitalize()} {run.measure.words}"
    charts = [
        (
            f"rounds-{group}",
            caption("rounds_so_far", score=score, group=group),
            rounds_chart(so_far, group),
        )
        for group in groups
    ]
    done = run.groups if run.methods and run.rows() else []
    page = Page(
        run.path.name,
        [Text(_summary(state))],
        [
            Section("", [Charts(charts)]),
            Section("Progress", [progress_table(state)]),
            *(Section(f"Done, agents {g} in training", [results_table([run], g)]) for g in done),
            Section("", [Warned("Could not be trained:", run.failures)]),
        ],
    )
    return page.render()[0]


def progress_table(state: TrainingState) -> Table:
    """Every method and seed: its state, round, latest scores and signals."""
    config, show = state.run.config, number_format(state.run)
    last = [_last_signals(part) for part in state.parts]
    scalars = dict.fromkeys(name for latest in last for name in latest)
    rows = []
    for part, latest in zip(state.parts, last, strict=True):
        at = f"{part.metrics[-1].round} of {config.rounds_of(part.method)}" if part.metrics else "–"
        scores = [show(score) if score == score else "–" for score in _last_scores(state, part)]
        more = [f"{latest[name]:.4g}" if name in latest else "–" for name in scalars]
        rows.append([part.method, str(part.seed), part.state, at, *scores, *more])
    titles = ["", "seed", "state", "round", "global", "personal"]
    names = [name.replace("_", " ") for name in scalars]
    waiting = [n for n, part in enumerate(state.parts) if part.state == "waiting"]
    return Table([*titles, *names], rows, waiting)


def _last_signals(part: PartState) -> dict[str, float]:
    """The latest value of each signal of training, such as the update norm."""
    return {
        name: value
        for line in part.metrics
        for name, value in signals(line).items()
        if isinstance(value, float) and value == value
    }


def _last_scores(state: TrainingState, part: PartState) -> Iterator[float]:
    """The scores of the global and personal model on seen agents when last evaluated."""
    evaluated = [m.evaluation["seen"] for m in part.metrics if "seen" in m.evaluation]
    shared = evaluated[-1].global_score if evaluated else nan
    yield or_nan(shared)
    personal = evaluated[-1].score[state.run.config.steps_of(part.method)[0]] if evaluated else nan
    yield or_nan(personal)


def _groups(state: TrainingState) -> list[str]:
    """The groups of agents that any part has evaluated."""
    evaluated = {str(g) for part in state.parts for m in part.metrics for g in m.evaluation}
    return [group for group in state.run.groups if group in evaluated]


def _summary(state: TrainingState) -> str:
    count = dict.fromkeys(("done", "failed", "training", "waiting"), 0)
    for part in state.parts:
        count[part.state] += 1
    parts = ", ".join(f"{number} {name}" for name, number in count.items() if number)
    missing = state.missing_baselines()
    nulls = f" Null baselines not done yet: {', '.join(missing)}." if missing else ""
    return (
        f"Not finished: of {len(state.parts)} methods and seeds {parts}.{nulls} Scores are those "
        "so far; this page is redrawn as the run proceeds, and becomes its report at the end."
    )


ADDRESS = "127.0.0.1"
POLL_SECONDS = 3
RELOAD = """<script>
setInterval(async () => {
  const found = await fetch(location.href, {method: "HEAD", cache: "no-store"}).catch(() => null);
  if (found && found.headers.get("ETag") !== %s) location.reload();
}, %d);
</script></body>"""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "script-src 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def loopback_hosts(port: int) -> list[str]:
    """What requests to a port of this machine may name as their host: no name of a foreign site."""
    return [f"{name}:{port}" for name in (ADDRESS, "localhost")]


class WatchedPage:
    """The page of a run, drawn again when its files have changed."""

    def __init__(self, run: Path, trust: bool) -> None:
        self._run, self._trust = run, trust
        self._lock = threading.Lock()
        self._drawn: tuple[str, bytes] | None = None

    def version(self) -> str:
        """Changes when the run makes progress."""
        return f'"{version_of(self._run)}"'

    def draw(self) -> tuple[str, bytes]:
        """The version and the page; raises RunError or OSError if the run can't be read."""
        with self._lock:
            version = self.version()
            if self._drawn is None or self._drawn[0] != version:
                page = watched_page(training_state(self._run, trust=self._trust))
                reload = RELOAD % (json.dumps(version), 1000 * POLL_SECONDS)
                before, _, after = page.rpartition(b"</body>")
                self._drawn = version, before + reload.encode() + after
            return self._drawn


class WatchServer(ThreadingTCPServer):
    """A server of one page on the loopback interface.

    Args:
        page: what to serve.
        port: 0 for a free one.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, page: WatchedPage, port: int = 0) -> None:
        self.page, self.path = page, f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__((ADDRESS, port), WatchHandler)
        except OSError as error:
            raise InputError(
                f"--port {port} can't be used ({error.strerror}): choose another, or 0 for any"
            ) from error
        self.hosts = loopback_hosts(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0]}{self.path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print unexpected errors; a closed connection is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class WatchHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page; refuses all else."""

    server_version, sys_version = "nufed", ""
    timeout = 10  # seconds for a request

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        server = cast(WatchServer, self.server)
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif not secrets.compare_digest(self.path.encode(), server.path.encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif not with_body:
            self._send(HTTPStatus.OK, server.page.version(), b"")
        else:
            try:
                self._send(HTTPStatus.OK, *server.page.draw())
            except (RunError, OSError) as error:  # for example a file that was replaced meanwhile
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, '""', _retry(str(error)))

    def _send(self, status: HTTPStatus, version: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "ETag": version}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


def _retry(reason: str) -> bytes:
    page = f"<p>This run can't be read just now: {escape(visible(reason))}</p>"
    refresh = f'<meta http-equiv="refresh" content="{POLL_SECONDS}">'
    return f'<!doctype html><meta charset="utf-8">{refresh}{page}'.encode("utf-8", "replace")
