"""Logs of servers and sites: text or JSON Lines, without terminal codes and Flower's ids."""

import json
import logging

import pytest
from flwr.app import Context, RecordDict

from flower.app.in_memory import MemoryGrid
from flower.app.test_apps import TEXT, app_of, start
from nufed.errors import InputError
from nufed.flower.logs import event, formatter, log_to, log_to_stderr, relayed

LINE = "\x1b[92mINFO \x1b[0m:      Receiving: train message (ID: " + 64 * "a" + ")\n"


def json_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("no_report")
def test_a_log_in_json_has_the_rounds_and_the_scores(tmp_path):
    app = app_of(tmp_path)
    grid = MemoryGrid(app.site, range(4), tmp_path / "sites")
    given = {"out": str(tmp_path / "run"), "log-format": "json"}
    app.server(grid, Context(1, 0, {}, RecordDict(), given))
    assert not (tmp_path / "run" / "log.txt").exists()
    lines = json_log(tmp_path / "run" / "log.jsonl")
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    rounds = [line for line in lines if line.get("event") == "round"]
    assert [line["round"] for line in rounds] == [0, 1, 2, 3]
    assert rounds[3]["rounds"] == 3 and rounds[3]["accepted"] == rounds[3]["asked"] == 2
    assert 0 <= rounds[3]["score"] <= 1 and rounds[3]["scored"] == 4
    assert f"personal {rounds[3]['score']:.3f}" in rounds[3]["message"]


@pytest.mark.usefixtures("no_report")
def test_a_site_says_what_it_does(tmp_path, caplog):
    caplog.set_level(logging.INFO, "nufed")
    start(app_of(tmp_path, TEXT), tmp_path, tmp_path / "run")
    said = [(r.getMessage(), r.fields) for r in caplog.records if hasattr(r, "fields")]
    messages = [text for text, _ in said]
    assert "data loaded: 24 samples (18 training, 6 test)" in messages
    trained = [f for _, f in said if f.get("event") == "trained" and f["round"] == 3]
    assert len(trained) == 2 and all(f["rounds"] == 3 and f["seconds"] > 0 for f in trained)
    first = f"round 3 of 3: trained on {trained[0]['samples']} samples in "
    assert any(text.startswith(first) for text in messages)
    scored = [f for text, f in said if f.get("event") == "scored" and f["round"] == 3]
    assert len(scored) == 4 and all(0 <= f["score"] <= 1 for f in scored)
    assert f"round 3 of 3: score {100 * scored[0]['score']:.0f} % (accuracy)" in messages


def test_lines_of_flower_lose_their_codes_and_ids():
    text = relayed(LINE, "text")
    assert text.endswith("INFO Receiving: train message")
    line = json.loads(relayed(LINE, "json"))
    assert line["message"] == "Receiving: train message" and line["level"] == "info"
    assert json.loads(relayed("\x1b[93mWARNING\x1b[0m: no\n", "json"))["level"] == "warning"
    for empty in ("\n", "\x1b[92mINFO \x1b[0m:      \n"):
        assert relayed(empty, "text") is None
    assert relayed("2026-11-17T17:48:02.464Z INFO [uvicorn] up\n", "text").endswith("[uvicorn] up")


def test_a_log_file_has_no_terminal_codes(tmp_path):
    with log_to(tmp_path, "text"), log_to(tmp_path, "json"):
        event("a \x1b[31mred\x1b[0m\nline of %s", 64 * "0", round=4)
        try:
            raise ValueError("inside")
        except ValueError:
            logging.getLogger("nufed").exception("failed")
    text = (tmp_path / "log.txt").read_text()
    assert "INFO a red\\nline of" in text and "\x1b" not in text and "ValueError: inside" in text
    first, second = json_log(tmp_path / "log.jsonl")
    assert first["message"].startswith("a red\\nline") and first["round"] == 4
    assert second["level"] == "error" and "ValueError: inside" in second["exception"]


def test_a_process_logs_flowers_warnings_in_the_same_format(capsys, monkeypatch):
    for name in ("nufed", "flwr"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "level", logger.level)
    log_to_stderr("json")
    logging.getLogger("flwr").info("Received message (ID: %s)", 64 * "0")
    logging.getLogger("flwr").warning("Connection attempt failed")
    event("connected")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["Connection attempt failed", "connected"]
    logging.getLogger("nufed").setLevel(logging.NOTSET)
    logging.getLogger("flwr").setLevel(logging.DEBUG)


def test_an_unknown_format_is_refused(nufed, tmp_path):
    with pytest.raises(InputError, match="must be one of text, json"):
        formatter("xml")
    shown = nufed(
        "federate", "site", "--number", 0, "--insecure", "--log-format", "xml", cwd=tmp_path
    )
    assert shown.returncode == 2 and "log-format = 'xml'" in shown.stderr
