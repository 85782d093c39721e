"""A site's own account of its work: log lines, and counts in a file of its folder.

Its administrator reads them, and ``nufed federate site --metrics-port`` serves them. Nothing of it
is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from nufed.errors import RunError, in_short
from nufed.flower.app.monitor import size_of
from nufed.flower.app.payload import ABOUT
from nufed.flower.app.secure_payload import TRAINS
from nufed.flower.app.site import Site
from nufed.flower.logs import event
from nufed.runs.site_activity import add_activity


def observed(
    site: Site, message: Message, respond: Callable[[Site, RecordDict], RecordDict]
) -> RecordDict:
    """The site's reply to a message, after a record of it."""
    began = time.perf_counter()
    try:
        reply = respond(site, message.content)
    except Exception as error:
        failure = {"failures": 1}
        _record(site, message, began, failure, {"last_failure": in_short(error)})
        raise
    _record(site, message, began, {"bytes_sent": size_of(reply)}, {})
    return reply


def _record(
    site: Site, message: Message, began: float, counts: dict[str, Any], latest: dict[str, Any]
) -> None:
    kind, seconds = message.metadata.message_type, time.perf_counter() - began
    about = message.content.get(ABOUT)
    round = about.get("round") if isinstance(about, ConfigRecord) else None
    if isinstance(round, int) and round >= 0:
        latest = {**latest, "round": round, "rounds": site.plan.rounds}
        if "failures" not in counts:
            _log(site, kind, round, seconds)
    counts = {
        **counts,
        "requests": {kind: 1},
        "seconds": {kind: seconds},
        "bytes_received": size_of(message.content),
    }
    latest = {**latest, "name": site.name, "updated": time.time(), **site.notes}
    with suppress(OSError, RunError):  # the run does not need it
        add_activity(site.folder, site.agent, counts, latest)


def _log(site: Site, kind: str, round: int, seconds: float) -> None:
    """One line about a round."""
    notes, of = site.notes, {"round": round, "rounds": site.plan.rounds, "seconds": seconds}
    method = site.plan.method
    where = f"{method}, round" if method else "round"
    where = f"{where} {round} of {site.plan.rounds}"
    if kind in TRAINS:
        samples = notes.get("samples", {}).get("training", 0)
        event(
            "%s: trained on %d samples in %.1f s", where, samples, seconds,
            event="trained", samples=samples, **of,
        )  # fmt: skip
    if "score" in notes:
        score, measure = notes["score"], notes["measure"]
        shown = f"{100 * score:.0f} %" if measure == "accuracy" else f"{score:.4g}"
        event(
            "%s: score %s (%s)", where, shown, measure,
            event="scored", score=score, measure=measure, **of,
        )  # fmt: skip
