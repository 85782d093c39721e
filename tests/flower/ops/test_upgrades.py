"""Real sites with other versions of nufed than the server's."""

from contextlib import ExitStack

import pytest

from flower.ops.commands import TIMEOUT, Federation
from flower.ops.small_app import DATA, write_app
from support import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
VERSIONS = (
    DATA
    + """

import os

import nufed.flower.app.payload as payload
import nufed.flower.app.roster as roster
import nufed.flower.app.site_app as at_site

roster.VERSION = payload.VERSION = "0.1.0"
at_site.VERSION = os.environ["NUFED_FAKE_VERSION"]
"""
)


def test_a_patch_version_takes_part_and_another_series_is_refused_and_named(tmp_path, monkeypatch):
    write_app(tmp_path / "app", 2, rounds=2, data=VERSIONS, wait=40.0)
    monkeypatch.setenv("NUFED_FAKE_VERSION", "0.1.0")
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, 0)
        for number, version in enumerate(("0.1.3", "0.2.0")):
            monkeypatch.setenv("NUFED_FAKE_VERSION", version)
            federation.sites.append(federation.start_site(number))
        process = federation.run("--out", "run")
        assert process.wait(2 * TIMEOUT) == 0, process.printed()
        refused = federation.sites[1].printed()
    (metrics,) = (tmp_path / "run").glob("methods/*/seed-*/metrics.jsonl")
    _, *rounds = json_lines(metrics)
    assert [line["taken"] for line in rounds] == [[0], [0]]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "it has nufed '0.2.0' and the server '0.1.0'" in log and "nufed '0.1.3'" not in log
    assert "this site has nufed 0.2.0 and the server 0.1.0" in refused
