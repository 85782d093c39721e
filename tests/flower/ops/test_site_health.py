"""The file by which a health check sees whether a site is connected."""

import os
import time

import nufed.flower.ops.site_runner as site_health
from nufed.flower.ops.site_runner import MAX_AGE, Health, health_file, is_connected
from processes import wait_for


def test_a_site_that_polls_or_works_is_connected(tmp_path, monkeypatch):
    monkeypatch.setattr(site_health, "TOUCH_INTERVAL", 0.01)
    file = health_file(tmp_path / "state", 3)
    health = Health(file)
    with health.shown():
        time.sleep(0.05)
        assert not is_connected(tmp_path / "state", 3)  # the server has not answered yet
        health.polled()
        wait_for(lambda: is_connected(tmp_path / "state", 3))
    assert not file.exists() and not is_connected(tmp_path / "state", 3)


def test_an_old_file_is_no_connection(tmp_path):
    health = Health(health_file(tmp_path, 0))
    health.polled()
    health.update()
    assert is_connected(tmp_path, 0)
    old = time.time() - MAX_AGE - 1
    os.utime(health_file(tmp_path, 0), (old, old))
    assert not is_connected(tmp_path, 0)


def test_a_server_that_does_not_answer_is_no_connection_but_long_work_is(tmp_path, monkeypatch):
    now = time.monotonic()
    file, health = health_file(tmp_path, 0), Health(health_file(tmp_path, 0))
    health.polled()
    with health.working():
        monkeypatch.setattr(site_health.time, "monotonic", lambda: now + 10 * MAX_AGE)
        health.update()
        assert file.exists()
    file.unlink()
    monkeypatch.setattr(site_health.time, "monotonic", lambda: now + 12 * MAX_AGE)
    health.update()
    assert not file.exists()
