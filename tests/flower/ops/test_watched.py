"""Real processes: a wrong configuration stops at once; status, metrics and logs of a run."""

import json
import re
import urllib.request
from contextlib import ExitStack, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flower.ops.commands import TIMEOUT, Federation, nufed_federate
from flower.ops.small_app import files_of, simulate, write_app
from nufed.flower.ops.flower_processes import free_ports, wait
from nufed.lab.runs.federation_records import read_traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def test_a_wrong_input_shape_stops_the_run_at_the_first_answers(tmp_path):
    app = write_app(tmp_path / "app", 2, rounds=2)
    text = (app / "federation.toml").read_text()
    (app / "federation.toml").write_text(text.replace("input_shape = [5]", "input_shape = [6]"))
    with nufed_federate(tmp_path, "local", "app", "--out", "run", "--insecure") as process:
        assert process.wait(TIMEOUT) == 2, process.printed()
    said = process.printed()
    assert "site 0 (site-0), site 1 (site-1): it failed: this site's inputs have shape (5,)" in said
    assert "federation.input_shape is [6]" in said and "meta_lr" not in said
    asked = read_traffic(tmp_path / "run")
    assert [(line.phase, line.round) for line in asked] == [("evaluate", 0)] * 2


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


def test_a_run_is_watched_by_status_metrics_and_logs(tmp_path):
    write_app(tmp_path / "app", 2, rounds=3)
    of_run, of_site = free_ports(2)
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, sites=1)
        options = ("--folder", "site-1", "--log-format", "json", "--metrics-port", of_site)
        site = stack.enter_context(
            nufed_federate(
                tmp_path, "site", "--number", 1, "--name", "Ward 1", *options, *federation.address
            )
        )
        process = federation.run("--out", "run", "--log-format", "json", "--metrics-port", of_run)
        rounds = set()

        def watch():
            with suppress(OSError):
                rounds.add(scrape(of_run).get(("nufed_round",)))
            return process.poll() is not None

        assert wait(watch, 2 * TIMEOUT) and process.wait(TIMEOUT) == 0, process.printed()
        own = scrape(of_site)
        with nufed_federate(tmp_path, "status", "run", "--json") as shown:
            assert shown.wait(TIMEOUT) == 0, shown.printed()
        status = json.loads(shown.printed())
    assert len(rounds & {0.0, 1.0, 2.0}) > 0  # scraped while it trained
    assert (status["state"], status["round"]) == ("finished", 3)
    assert [each["name"] for each in status["sites"]] == ["site-0", "Ward 1"]
    assert all(each["connected"] for each in status["sites"]) and not status["left_out"]
    assert own["nufed_site_request_seconds_count", "train"] == 3
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if line.get("event") == "round"] == [0, 1, 2, 3]
    said = [json.loads(line) for line in site.printed().splitlines() if line.startswith("{")]
    events = [line.get("event") for line in said]
    assert events.count("trained") == 3 and "data loaded" in events and "scored" in events
    for log in [*tmp_path.glob("printed-*"), tmp_path / "run" / "log.jsonl"]:
        text = re.sub(r"the head of the audit log is \w+", "", log.read_text())
        assert "\x1b" not in text and not re.search(r"[Mm]essage.*\b[0-9a-f]{64}\b", text), log
    simulate(tmp_path / "app", tmp_path / "simulated", "site-{}")
    right = files_of(tmp_path / "simulated")["model.safetensors"]
    assert files_of(tmp_path / "run")["model.safetensors"] == right
