"""Fetching data sets, from a local web server that misbehaves on request."""

import errno
import gzip
import hashlib
import io
import re
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from nufed import InputError
from nufed.lab import downloads
from nufed.lab.readers.sources import MNIST_WRITERS, SOURCES, STORED, Stored
from processes import PATIENCE

CONTENT = {
    "tiny/a.bin": np.random.default_rng(0).bytes(5000),
    "tiny/b.bin": np.random.default_rng(1).bytes(3000),
}
SHA256 = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
TINY = Stored("tiny", SHA256, "https://127.0.0.1/tiny.tar.gz")


def packed(content=CONTENT, others=()):
    """A .tar.gz of files, after other members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member in others:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def link(name, target):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def file(name, size=10):
    member = tarfile.TarInfo(name)
    member.size = size
    return member


ARCHIVE = packed()
HALF = len(ARCHIVE) // 2


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The data directory, empty."""
    monkeypatch.setenv("NUFED_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(downloads, "FIRST_BACKOFF", 0)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def server(monkeypatch):
    """A web server; ``plan`` holds what goes wrong with each request in turn, then nothing does."""
    monkeypatch.setenv("no_proxy", "*")
    state = SimpleNamespace(body=ARCHIVE, etag='"1"', plan=[], asked=[])
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            wrong = state.plan.pop(0) if state.plan else ""
            asked = self.headers.get("Range")
            state.asked.append(asked)
            if isinstance(wrong, int):
                self.send_error(wrong)
                return
            body, first = state.body, 0
            fits = wrong == "ignores If-Range" or self.headers.get("If-Range") == state.etag
            if asked and fits and wrong != "ignores Range":
                first = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            past = bool(first) and first >= len(body)
            self.send_response(416 if past else 206 if first else 200)
            if past:
                self.send_header("Content-Range", f"bytes */{len(body)}")
            elif first:
                first -= 7 * (wrong == "sends another part")
                self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            if state.etag:
                self.send_header("ETag", state.etag)
            self.send_header("Content-Length", str(max(0, len(body) - first)))
            self.end_headers()
            stop = HALF if wrong in ("stalls", "cuts off") else len(body)
            self.wfile.write(body[first:stop])
            if wrong == "stalls":
                self.wfile.flush()
                done.wait(PATIENCE)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}/tiny.tar.gz"
    yield state
    done.set()
    http.shutdown()
    thread.join()
    http.server_close()


def left(directory):
    """The files below a directory."""
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


def assert_complete(directory):
    assert left(directory) == ["tiny", *CONTENT]
    assert all((directory / name).read_bytes() == data for name, data in CONTENT.items())


def start_of_a_download(directory, archive=ARCHIVE, version='"1"'):
    (directory / "tiny.tar.gz.part").write_bytes(archive)
    (directory / "tiny.tar.gz.part.version").write_text(version)


def get(server, **settings):
    return downloads.fetch(TINY, url=server.url, timeout=PATIENCE, **settings)


def test_a_download_is_checked_unpacked_and_not_repeated(directory, server):
    seen = []
    assert get(server, on_progress=lambda done, total: seen.append((done, total)))
    assert_complete(directory)
    assert seen[0] == (0, len(ARCHIVE)) and seen[-1] == (len(ARCHIVE), len(ARCHIVE))
    assert not get(server) and server.asked == [None]
    (directory / "tiny/a.bin").write_bytes(b"spoilt")
    assert get(server)
    assert_complete(directory)


@pytest.mark.parametrize(
    ("plan", "ranges"),
    [
        (["cuts off"], [None, HALF]),
        (["cuts off", 503, 500], [None, HALF, HALF, HALF]),
        (["cuts off", "ignores Range"], [None, HALF]),
        (["cuts off", "sends another part"], [None, HALF, None]),
        (["cuts off", 416], [None, HALF, None]),
    ],
)
def test_an_interrupted_download_is_resumed(plan, ranges, directory, server):
    server.plan = plan
    assert get(server)
    assert server.asked == [None if r is None else f"bytes={r}-" for r in ranges]
    assert_complete(directory)


def test_a_stalled_connection_times_out_and_is_retried(directory, server):
    server.plan = ["stalls"]
    assert downloads.fetch(TINY, url=server.url, timeout=1)
    assert server.asked == [None, f"bytes={HALF}-"]
    assert_complete(directory)


def test_a_later_run_resumes_and_a_complete_download_is_not_repeated(directory, server):
    start_of_a_download(directory, ARCHIVE[:HALF])
    assert get(server) and server.asked == [f"bytes={HALF}-"]
    assert_complete(directory)
    (directory / "tiny/a.bin").unlink()
    start_of_a_download(directory)
    assert get(server) and server.asked[1:] == [f"bytes={len(ARCHIVE)}-"]
    assert_complete(directory)


@pytest.mark.parametrize("plan", [[], ["ignores If-Range"]])
def test_two_versions_of_a_file_are_not_mixed(plan, directory, server):
    start_of_a_download(directory, b"the start of an older file", version='"0"')
    server.plan = plan
    assert get(server)
    assert_complete(directory)


@pytest.mark.parametrize("version", ["", "two\nlines", "ÿ"])
def test_a_partial_file_of_unknown_version_is_not_used(version, directory, server):
    start_of_a_download(directory, b"who knows", version)
    assert get(server)
    assert_complete(directory)


def test_without_a_version_the_whole_file_is_requested_again(directory, server):
    server.etag, server.plan = "", ["cuts off"]
    assert get(server) and server.asked == [None, None]
    assert_complete(directory)


def test_after_the_last_attempt_the_partial_file_is_kept(directory, server):
    server.plan = ["cuts off", 500, 503]
    with pytest.raises(InputError, match=r"503.*3 attempts.*run the command again.*--url.*--from"):
        get(server, attempts=3)
    assert left(directory) == ["tiny.tar.gz.part", "tiny.tar.gz.part.version"]
    assert (directory / "tiny.tar.gz.part").read_bytes() == ARCHIVE[:HALF]
    assert get(server) and server.asked[-1] == f"bytes={HALF}-"
    assert_complete(directory)


def test_ctrl_c_keeps_the_partial_file(directory, server):
    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(server, on_progress=stop)
    assert left(directory) == ["tiny.tar.gz.part", "tiny.tar.gz.part.version"]
    assert get(server) and server.asked[-1].startswith("bytes=")
    assert_complete(directory)


def test_a_missing_file_is_requested_once(directory, server):
    server.plan = [404]
    with pytest.raises(InputError, match=r"status 404.*--url.*--from"):
        get(server)
    assert server.asked == [None] and not left(directory)


def test_no_server_responds(directory):
    with pytest.raises(InputError, match=r"refused, 2 attempts"):
        downloads.fetch(TINY, url="http://127.0.0.1:1/tiny.tar.gz", attempts=2)
    assert not left(directory)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///etc/passwd", "--from"),
        ("ftp://host/tiny.tar.gz", "must be an address like https"),
        ("tiny.tar.gz", "must be an address like https"),
        ("http://", "must be an address like https"),
        ("http://[", "must be an address like https"),
        ("http://host:port/", "not a valid address"),
        ("http://host/a b", "not a valid address"),
    ],
)
def test_other_addresses_are_refused(url, sentence, directory):
    with pytest.raises(InputError, match=sentence):
        downloads.fetch(TINY, url=url)
    assert not left(directory)


def test_an_endless_download_is_refused(directory, server, monkeypatch):
    monkeypatch.setattr(downloads, "MAX_BYTES", 1000)
    with pytest.raises(InputError, match="larger than"):
        get(server)
    assert not left(directory)


WRONG = {
    "another content": (packed(CONTENT | {"tiny/b.bin": b"other"}), r"SHA-256 of tiny/b.bin"),
    "cut short": (ARCHIVE[:HALF], "not a whole .tar.gz"),
    "cut at the end": (ARCHIVE[:-600], "not a whole .tar.gz"),
    "a flipped bit": (
        ARCHIVE[:HALF] + bytes([ARCHIVE[HALF] ^ 8]) + ARCHIVE[HALF + 1 :],
        "not a|SHA",
    ),
    "a page": (b"<html>please log in</html>", "not a whole .tar.gz"),
    "no bytes": (b"", "not a whole .tar.gz"),
    "no tar": (gzip.compress(b"hello" * 1000), "not a whole .tar.gz"),
    "a file lacking": (packed({"tiny/a.bin": CONTENT["tiny/a.bin"]}), "tiny/b.bin is not in it"),
    "other names": (packed({f"../{n}": c for n, c in CONTENT.items()}), "a.bin.*is not in it"),
    "absolute names": (packed({f"/{n}": c for n, c in CONTENT.items()}), "a.bin.*is not in it"),
    "links": (packed({}, [link(n, "/etc/passwd") for n in CONTENT]), "a.bin.*is not in it"),
    "too large": (packed(others=[file("tiny/a.bin", 100_000)]), "unpacks to more than"),
    "too large beside": (packed(others=[file("other", 100_000)]), "unpacks to more than"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_archive_is_refused_and_leaves_nothing(
    name, directory, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(downloads, "MAX_ARCHIVE_BYTES", 50_000)
    server.body, sentence = WRONG[name]
    with pytest.raises(InputError, match=sentence) as caught:
        get(server)
    assert "was removed" in str(caught.value) and "\n" not in str(caught.value)
    assert not left(directory)

    given = tmp_path / "given.tar.gz"
    given.write_bytes(server.body)
    (directory / "tiny").mkdir()
    (directory / "tiny/b.bin").write_bytes(b"mine")
    with pytest.raises(InputError, match=sentence):
        downloads.fetch(TINY, archive=given)
    assert given.read_bytes() == server.body
    assert left(directory) == ["tiny", "tiny/b.bin"]
    assert (directory / "tiny/b.bin").read_bytes() == b"mine"


def test_only_the_files_of_the_data_set_are_extracted(directory, tmp_path):
    others = [
        file("../outside"),
        file("/tmp/outside"),
        file("tiny/readme.html"),
        link("tiny/a.bin", "/etc/passwd"),
        link("tiny", "/tmp"),
    ]
    given = tmp_path / "given.tar.gz"
    given.write_bytes(packed({f"./{name}": data for name, data in CONTENT.items()}, others))
    assert downloads.fetch(TINY, archive=given)
    assert_complete(directory)
    assert left(tmp_path) == ["data", "data/tiny", *(f"data/{n}" for n in CONTENT), given.name]


def test_files_and_settings_that_cannot_be(directory, tmp_path):
    with pytest.raises(InputError, match=r"nowhere.* can't be read"):
        downloads.fetch(TINY, archive=tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"can't be read \(Is a directory"):
        downloads.fetch(TINY, archive=tmp_path)
    with pytest.raises(InputError, match="both"):
        downloads.fetch(TINY, archive=tmp_path, url="http://127.0.0.1/")
    assert not left(directory)


def test_a_data_directory_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUFED_DATA", str(tmp_path / "file/data"))
    with pytest.raises(InputError, match=r"file/data can't be written .*NUFED_DATA"):
        downloads.fetch(TINY)
    assert left(tmp_path) == ["file"]


def test_a_full_disk_while_unpacking(directory, server, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(downloads.os, "fsync", full)
        with pytest.raises(InputError, match=r"No space left.*fix that"):
            get(server)
    # the download is valid and need not be repeated
    assert left(directory) == ["tiny.tar.gz.part", "tiny.tar.gz.part.version"]
    assert get(server) and server.asked[-1] == f"bytes={len(ARCHIVE)}-"
    assert_complete(directory)


def test_a_download_that_cannot_be_written(directory, server):
    (directory / "tiny.tar.gz.part").mkdir()
    with pytest.raises(InputError, match=r"tiny.tar.gz.part can't be written \(Is a directory\)"):
        get(server)
    assert left(directory) == ["tiny.tar.gz.part"]


@pytest.fixture
def listed(monkeypatch):
    """The small data set among those that the command line knows."""
    monkeypatch.setitem(SOURCES, "tiny", lambda: None)
    monkeypatch.setitem(STORED, "tiny", TINY)


@pytest.mark.usefixtures("listed")
def test_the_command_ends_with_where_the_data_is(directory, server, nufed, tmp_path):
    result = nufed("data", "get", "tiny", "--url", server.url, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"tiny: {directory / 'tiny'}\n"
    assert result.stderr.startswith("tiny: 0.0 of 0.0 MB\n")
    assert_complete(directory)
    again = nufed("data", "get", "tiny", cwd=tmp_path)
    assert again.returncode == 0 and "already complete" in again.stdout and not again.stderr


@pytest.mark.usefixtures("listed")
def test_the_command_says_that_it_can_be_resumed(directory, nufed, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("nufed.lab.downloads.fetch", stopped)
    result = nufed("data", "get", "tiny", cwd=tmp_path)
    assert result.returncode == 130 and "run the same command again" in result.stderr


def writers(count=4, **changed):
    arrays = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = np.zeros((count, 28, 28), np.uint8)
        arrays[f"y_{part}"] = np.arange(count, dtype=np.uint8)
        arrays[f"writer_{part}"] = np.arange(count, dtype=np.int16) // 2
    buffer = io.BytesIO()
    np.savez(buffer, **(arrays | changed))
    return buffer.getvalue()


def test_a_data_set_that_the_user_made_is_checked_and_copied(directory, tmp_path):
    with pytest.raises(InputError, match=r"docs/data.md says how to make mnist_by_writer.npz"):
        downloads.fetch(MNIST_WRITERS)
    given = tmp_path / "mine.npz"
    given.write_bytes(b"PK not really")
    with pytest.raises(InputError, match=r"mine.npz does not have the layout"):
        downloads.fetch(MNIST_WRITERS, archive=given)
    given.write_bytes(writers(y_test=np.zeros(3, np.uint8)))
    with pytest.raises(InputError, match=r"y_test must hold"):
        downloads.fetch(MNIST_WRITERS, archive=given)
    assert not left(directory)
    given.write_bytes(writers())
    assert downloads.fetch(MNIST_WRITERS, archive=given)
    assert left(directory) == ["mnist_by_writer.npz"]
    assert (directory / "mnist_by_writer.npz").read_bytes() == given.read_bytes()
