"""Metrics on loopback, read with the parser of Prometheus's own client."""

import http.client
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flower.app.in_memory import plan_of
from flower.app.test_apps import TEXT, app_of, start
from flower.app.test_faults import FEDAVG
from nufed.errors import Fault, InputError, UpdateError
from nufed.flower.app.events import (
    EventLog,
    RoundRecorded,
    RoundTrained,
    SitesSeen,
)
from nufed.flower.ops.flower_processes import free_ports
from nufed.flower.ops.prometheus import run_metrics, serving, site_metrics
from nufed.lab.runs.federation_records import read_activity, read_status, read_traffic
from nufed.server import Progress


def scrape(port):
    """Every sample by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.mark.usefixtures("no_report")
def test_a_run_and_its_sites_are_scraped(tmp_path):
    def late(agent, message, reply):
        kind = message.metadata.message_type, message.content.get("about", {}).get("round")
        return None if agent == 0 and kind == ("train", 3) else reply

    text = TEXT.replace("participation = 0.75", "participation = 1.0")
    start(app_of(tmp_path, text), tmp_path, tmp_path / "run", late)
    server, site = free_ports(2)
    with (
        serving(server, lambda: run_metrics(read_status(tmp_path / "run"))),
        serving(site, lambda: site_metrics(read_activity(tmp_path / "sites", 1), True)),
    ):
        run, own = scrape(server), scrape(site)
        taken = pytest.raises(InputError, match=f"--metrics-port {server}: can't listen there")
        with taken, serving(server, list):
            pass
    lines = read_traffic(tmp_path / "run")
    assert run["nufed_round",] == run["nufed_rounds_planned",] == 3
    assert run["nufed_sites",] == run["nufed_sites_connected",] == 4
    assert run["nufed_round_seconds_count",] == 3 and run["nufed_round_seconds_sum",] > 0
    assert run["nufed_bytes_total", "down"] == sum(line.bytes_down for line in lines)
    assert run["nufed_bytes_total", "up"] == sum(line.bytes_up for line in lines)
    assert run["nufed_left_out_total", "late"] == 1 and run["nufed_failed",] == 0
    mine = [line for line in lines if line.agent == 1]
    trained = [line for line in mine if line.phase == "train"]
    assert own["nufed_site_request_seconds_count", "train"] == len(trained) == 3
    assert own["nufed_site_request_seconds_sum", "train"] > 0
    assert own["nufed_site_samples", "training"] == 21 and own["nufed_site_round",] == 3
    assert 0 <= own["nufed_site_score", "accuracy"] <= 1
    assert own["nufed_site_bytes_total", "down"] >= sum(line.bytes_down for line in mine)
    assert own["nufed_site_failures_total",] == 0


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:{}", "127.0.0.1", None])
def test_a_request_that_names_another_host_is_refused(host):
    """A foreign web site could have pointed its name here."""
    (port,) = free_ports(1)
    with serving(port, lambda: run_metrics(EventLog(plan_of(FEDAVG)).status())):
        for names in ([host], [f"localhost:{port}", host], [host, f"localhost:{port}"]):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.putrequest("GET", "/metrics", skip_host=True)
            for name in names if host else ():
                connection.putheader("Host", name.format(port))
            connection.endheaders()
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (403, b"")
            connection.close()
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=60) as page:
            assert b"nufed_round" in page.read()


def test_epsilon_is_a_metric_and_no_sites_of_a_round_are():
    log = EventLog(plan_of(FEDAVG))
    log.record(SitesSeen(frozenset([0, 1]), {0: "Ward 0", 1: "Ward 1"}))
    failed = UpdateError(1, 1, "it failed: x", Fault.AT_SITE)
    log.record(RoundTrained(Progress(1, {}, cohort=(0, 1), rejected=(failed,))))
    log.record(RoundRecorded(1, {"released": 1.5, "server": float("inf")}))
    (port,) = free_ports(1)
    with serving(port, lambda: run_metrics(log.status())):
        found = scrape(port)
    assert found["nufed_epsilon", "released"] == 1.5
    assert found["nufed_left_out_total", "failed at the site"] == 1
    assert not any("Ward" in part for key in found for part in key)


@pytest.mark.usefixtures("no_report")
def test_a_sites_epsilon_and_failures(tmp_path):
    private = TEXT + "[privacy]\nclip = 1.0\nnoise = 4.0\n"
    start(app_of(tmp_path, private), tmp_path, tmp_path / "run")
    found = [read_activity(tmp_path / "sites", number) for number in range(4)]
    spent = [site.epsilon for site in found if site.epsilon is not None]
    line = read_status(tmp_path / "run").epsilon
    assert spent and max(spent) == pytest.approx(line["server"])
    assert all(site.score is None for site in found)


def test_only_loopback_is_served_and_only_if_asked(tmp_path):
    (port,) = free_ports(1)
    with serving(None, list), pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)
    with serving(port, lambda: run_metrics(read_status(tmp_path))):  # nothing is written yet
        assert scrape(port) == {}
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), 1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)
