"""Metrics for Prometheus, on loopback only: of a run at the server, and of a site.

They are read from the files that the server and the site write, at every scrape. No metric names
the sites of a round, which are secret in a private run. Requests that name another host are
refused, as by ``nufed watch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from nufed.errors import InputError, NufedError
from nufed.lab.runs.federation_records import SiteActivity, StatusRecord

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@contextmanager
def serving(port: int | None, read: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    """Serve the metrics that ``read`` gives at every scrape; without a port, none."""
    if port is None:
        yield
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise InputError(
            '--metrics-port needs prometheus-client: pip install "nufed[metrics]"'
        ) from error

    class Reader(Collector):
        def collect(self) -> Iterator[Metric]:
            try:
                yield from list(read())
            except NufedError:  # nothing was written yet
                return

    from nufed.lab.report.watch import ADDRESS, loopback_hosts

    registry, hosts = CollectorRegistry(), loopback_hosts(port)
    try:
        server, thread = start_http_server(port, ADDRESS, registry)
    except OSError as error:
        raise InputError(
            f"--metrics-port {port}: can't listen there ({error.strerror}); give another port"
        ) from error
    metrics = server.get_app()

    def checked(environ: dict[str, Any], start: Any) -> Any:
        if environ.get("HTTP_HOST") in hosts:
            return metrics(environ, start)  # type: ignore[misc]
        start("403 Forbidden", [])
        return []

    server.set_app(checked)
    registry.register(Reader())  # now that hosts are checked
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Numbers: TypeAlias = float | tuple[int, float]  # of a summary a count and a sum


def _family(
    kind: str, name: str, help: str, values: Numbers | Mapping[str, Numbers], label: str = ""
) -> Metric:
    """A number, or one for each value of a label."""
    from prometheus_client import core

    def labels(label: str) -> list[str]:
        return [label] if label else []

    family = getattr(core, f"{kind}MetricFamily")(name, help, labels=labels(label))
    for of, numbers in values.items() if isinstance(values, Mapping) else [("", values)]:
        family.add_metric(labels(of), *(numbers if isinstance(numbers, tuple) else (numbers,)))
    made: Metric = family
    return made


_gauge, _counter, _summary = (partial(_family, kind) for kind in ("Gauge", "Counter", "Summary"))


def run_metrics(status: StatusRecord) -> Iterator[Metric]:
    """The metrics of a run, at the server."""
    yield _gauge("nufed_round", "Rounds done.", status.round)
    yield _gauge("nufed_rounds_planned", "Rounds of the configuration.", status.rounds)
    yield _gauge("nufed_sites", "Sites of the configuration.", len(status.sites))
    connected = sum(site.connected for site in status.sites)
    yield _gauge("nufed_sites_connected", "Sites that are connected.", connected)
    yield _gauge("nufed_failed", "1 if the run has failed.", status.state == "failed")
    yield _gauge("nufed_updated_seconds", "Time of the last sign of life.", status.updated)
    yield _summary(
        "nufed_round_seconds",
        "Durations of rounds.",
        (status.rounds_timed, status.round_seconds),
    )
    by_direction = {"down": status.bytes_down, "up": status.bytes_up}
    yield _counter("nufed_bytes", "Bytes of messages.", by_direction, "direction")
    yield _counter("nufed_left_out", "Updates and scores left out.", status.left_out, "reason")
    if status.seconds_left is not None:
        yield _gauge("nufed_seconds_left", "Estimated time left.", status.seconds_left)
    spent = {str(of): epsilon for of, epsilon in status.epsilon.items() if epsilon is not None}
    if spent:
        yield _gauge("nufed_epsilon", "Privacy spent (epsilon).", spent, "of")


def site_metrics(site: SiteActivity, connected: bool) -> Iterator[Metric]:
    """The metrics that a site serves about itself."""
    yield _gauge("nufed_site_connected", "1 if this site is connected to its server.", connected)
    yield _gauge("nufed_site_round", "The last round that this site worked on.", site.round)
    yield _gauge("nufed_site_updated_seconds", "Time of its last work.", site.updated)
    durations = {kind: (n, site.seconds.get(kind, 0.0)) for kind, n in site.requests.items()}
    yield _summary("nufed_site_request_seconds", "Durations of requests.", durations, "kind")
    by_direction = {"down": site.bytes_received, "up": site.bytes_sent}
    yield _counter("nufed_site_bytes", "Bytes of messages.", by_direction, "direction")
    yield _counter("nufed_site_failures", "Requests that failed.", site.failures)
    yield _gauge("nufed_site_samples", "Samples by part.", site.samples, "part")
    if site.score is not None:
        scores = {site.measure: site.score}
        yield _gauge("nufed_site_score", "The last score of its personal model.", scores, "measure")
    if site.epsilon is not None:
        help = "Privacy spent (epsilon) against the server, in the current run."
        yield _gauge("nufed_site_epsilon", help, site.epsilon)
