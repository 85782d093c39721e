"""`nufed watch` shows a run that trains, to its user only, and leaves the run alone."""

import http.client
import json
import re
import shutil
import socket
import threading
from contextlib import contextmanager

import pytest

import nufed as library
from nufed.errors import InputError
from nufed.lab.cli import result_commands
from nufed.lab.report.watch import WatchedPage, WatchServer
from nufed.lab.runs.read_run import rounds_so_far, training_state

CONFIG = {
    "rounds": 6,
    "eval_every": 2,
    "seeds": [0, 1],
    "workers": 1,
    "baselines": ["majority"],
    "data": {"agents": 4, "samples_per_agent": 30, "unseen_agents": 1},
    "model": {"args": {"hidden": [4]}},
    "method": {"batch_size": 6},
    "methods": {"first": {"algorithm": "gmeta"}, "second": {"algorithm": "fedavg"}},
}
LOOKED_AT = [(0, "first", 3), (0, "second", 6), (1, "second", 2)]


@contextmanager
def served(path):
    """A server in a thread of its own."""
    with WatchServer(WatchedPage(path, trust=False)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, method="GET", path=None, **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=60)
    connection.request(method, server.path if path is None else path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def files(path):
    return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*") if p.is_file()}


def cells(page):
    """The rows of the first table."""
    table = re.search(r"<table>(.*?)</table>", page.split("<h1>")[1], re.DOTALL)[1]
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table.split("</tr>")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if row]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A run that is looked at while it trains: pages by (seed, method, round), and the server."""
    path, pages = tmp_path_factory.mktemp("watched") / "run", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)

        def look(event):
            key = event.seed, event.method, event.round
            if key in LOOKED_AT and key not in pages and not getattr(event, "starts", False):
                before = files(path)
                with served(path) as server:
                    answer, page = ask(server)
                assert files(path) == before  # watching writes nothing
                pages[key] = answer, page

        run = library.run(CONFIG, out=path, figures=False, on_progress=look)
    return run, pages


@pytest.fixture(scope="module")
def server(seen):
    """A server of the finished run."""
    with served(seen[0].path) as running:
        yield running


def test_a_run_in_training_shows_its_rounds_so_far(seen):
    _, pages = seen
    assert list(pages) == LOOKED_AT
    answer, page = pages[0, "first", 3]
    assert answer.status == 200 and answer.headers["Cache-Control"] == "no-store"
    states = {(row[""], row["seed"]): (row["state"], row["round"]) for row in cells(page)}
    assert states == {
        ("first", "0"): ("training", "3 of 6"),
        ("first", "1"): ("waiting", "–"),
        ("second", "0"): ("waiting", "–"),
        ("second", "1"): ("waiting", "–"),
    }
    assert "Not finished: of 4 methods and seeds 1 training, 3 waiting." in page
    assert "Done, agents" not in page
    last = cells(pages[1, "second", 2][1])
    assert [row["state"] for row in last] == ["done", "done", "done", "training"]
    assert "Done, agents seen in training" in pages[1, "second", 2][1]


def test_its_curves_are_those_of_the_metrics(seen):
    run, pages = seen
    specs = json.loads(re.search(r"const specs = (\{.*\});\n", pages[1, "second", 2][1])[1])
    assert list(specs) == ["rounds-seen", "rounds-unseen"]
    spec = specs["rounds-seen"]
    (layer,) = (layer for layer in spec["layer"] if layer["mark"]["type"] == "point")
    points = layer["data"].get("values") or spec["datasets"][layer["data"]["name"]]
    found = {(p["method"], p["round"]): (p["low"], p["high"]) for p in points}
    wanted = {}
    for name, most in (("first", 6), ("second", 2)):
        for at in (0, 2, 4, 6):
            seeds = [0, 1] if at <= most else [0]  # seed 1 has not reached it
            lines = [run.methods[name][seed].metrics[at] for seed in seeds]
            scores = [line.evaluation["seen"].score[1] for line in lines]
            wanted[name, at] = min(scores), max(scores)
    assert found == wanted


def test_a_finished_run_shows_its_report_and_is_redrawn_when_it_changes(seen):
    run, pages = seen
    with served(run.path) as server:
        first, page = ask(server)
        head, body = ask(server, "HEAD")
        assert first.status == head.status == 200 and body == ""
        assert first.headers["ETag"] == head.headers["ETag"]
        assert json.dumps(first.headers["ETag"]) in page  # the page compares with it
        assert (
            "<h2>All results</h2>" in page
            and "over majority" in page
            and "Not finished" not in page
        )
        metrics = run.path / "methods/first/seed-0/metrics.jsonl"
        content = metrics.read_bytes()
        try:
            metrics.write_bytes(content + b"{}\n")
            changed, damaged = ask(server)
            assert changed.status == 503 and "its SHA-256 differs" in damaged
        finally:
            metrics.write_bytes(content)
        assert ask(server)[0].status == 200
    assert first.headers["ETag"] != pages[0, "first", 3][0].headers["ETag"]


def test_a_line_that_is_being_written_is_left_out(seen, tmp_path):
    content = (seen[0].path / "methods/first/seed-0/metrics.jsonl").read_bytes()
    cut = tmp_path / "metrics.jsonl"
    assert rounds_so_far(cut) == []
    for length in range(0, len(content), 97):
        cut.write_bytes(content[:length])
        assert [m.round for m in rounds_so_far(cut)] == list(range(content[:length].count(b"\n")))


def test_it_reads_a_run_that_is_locked(seen):
    with library.files.locked(seen[0].path):
        assert training_state(seen[0].path).finished


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", "localhost:80"])
def test_requests_that_name_another_host_are_refused(server, host):
    answer, body = ask(server, Host=host)
    assert answer.status == 403 and "Results" not in body
    assert ask(server, Host=f"localhost:{server.server_address[1]}")[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/report.html",
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "http://127.0.0.1/",
        "/" + "x" * 60_000,
    ],
)
def test_nothing_but_the_page_is_served(server, path):
    for asked in (path, server.path + path.lstrip("/"), server.path[:-1], server.path + "?x"):
        if asked != server.path:
            answer, body = ask(server, path=asked)
            assert answer.status in (403, 404, 414), asked
            assert "root:" not in body and "Results" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
def test_it_is_read_only(seen, server, method):
    before = files(seen[0].path)
    answer, body = ask(server, method)
    assert answer.status == 501 and "Results" not in body
    assert files(seen[0].path) == before


def test_garbage_does_not_stop_it(server, capfd):
    page = server.path.encode()
    for request in (b"", b"\r\n", b"\x00\xff" * 99, b"GET " + page + b" HTTP/1.1\r\n\r\n",
                    b"GET " + page + b" HTTP/9.9\r\nHost: x\r\n\r\n",
                    b"GET " + page + b" HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):  # fmt: skip
        with socket.create_connection(server.server_address, timeout=60) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            assert b" 200 " not in client.recv(10_000).partition(b"\r\n")[0]
    assert ask(server)[0].status == 200
    assert capfd.readouterr().err == ""


def test_only_this_machine_can_connect_and_a_used_port_is_refused(seen, server):
    host, port = server.server_address
    assert host == "127.0.0.1"
    assert len(server.path) > 20 and server.url == f"http://127.0.0.1:{port}{server.path}"
    with pytest.raises(InputError, match=rf"--port {port} can't be used"):
        WatchServer(WatchedPage(seen[0].path, trust=False), port)


def test_ctrl_c_ends_the_command(seen, nufed, monkeypatch):
    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve_forever", interrupted)
    said = nufed("watch", seen[0].path, cwd=seen[0].path.parent)
    assert said.returncode == 0 and said.stdout.endswith("stopped watching\n")
    assert re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/ ", said.stdout)
    (seen[0].path.parent / "other").mkdir()
    said = nufed("watch", "other", cwd=seen[0].path.parent)
    assert said.returncode == 2 and "is not a run directory" in said.stderr


def test_it_waits_for_a_run_that_is_about_to_start(seen, nufed, monkeypatch, tmp_path):
    """And says so in one line; Ctrl-C ends the waiting, too."""
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            (tmp_path / "soon").mkdir()  # a start writes run.json last
        if len(looks) == 2:
            shutil.copytree(seen[0].path, tmp_path / "soon", dirs_exist_ok=True)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve_forever", interrupted)
    monkeypatch.setattr(result_commands.time, "sleep", sleep)
    said = nufed("watch", "soon", cwd=tmp_path)
    assert said.returncode == 0 and len(looks) == 2
    first, second, _ = said.stdout.splitlines()
    assert "waiting for a run to start in soon, which does not exist yet" in first
    assert second.startswith("watching soon at http://127.0.0.1:")
    monkeypatch.setattr(result_commands.time, "sleep", interrupted)
    said = nufed("watch", "later", cwd=tmp_path)
    assert said.returncode == 0 and said.stdout.splitlines()[1:] == ["stopped watching"]


def test_report_and_bundle_work_for_what_is_finished(tmp_path, nufed):
    def stop(event):
        if (event.seed, event.method, event.round) == stop.at:
            raise KeyboardInterrupt

    for stop.at, name in (((0, "first", 3), "early"), ((1, "second", 3), "late")):
        with pytest.raises(KeyboardInterrupt):
            library.run(CONFIG, out=tmp_path / name, figures=False, on_progress=stop)
    none = nufed("report", "early", "--no-figures", cwd=tmp_path)
    assert none.returncode == 2 and "no method of early is finished: wait, or" in none.stderr
    said = nufed("report", "late", "--no-figures", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "not finished, left out above: second, seed 1\n" in said.stdout
    page = (tmp_path / "late/report.html").read_text()
    assert "<b>Not finished, and left out above:</b>\n<ul><li>second, seed 1</li></ul>" in page
    assert "<td>first</td>" in page and "<td>second</td>" in page
    made = nufed("bundle", "late", "--method", "first", "--seed", 1, cwd=tmp_path)
    assert made.returncode == 0 and (tmp_path / "first.nufed").exists()
    made = nufed("bundle", "late", "--method", "second", "--seed", 1, cwd=tmp_path)
    assert made.returncode == 2 and "second, seed 1 of late is not finished: wait" in made.stderr
