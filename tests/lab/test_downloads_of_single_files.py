"""Fashion-MNIST, a data set of single files, from a web server on this machine."""

import dataclasses
import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nufed import InputError
from nufed.lab import downloads
from nufed.lab.readers import sources
from nufed.lab.readers.sources import FASHION_MNIST, SHAKESPEARE, STORED


def idx(array):
    """A gzipped idx file of bytes."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return gzip.compress(head + array.astype(np.uint8).tobytes())


RNG = np.random.default_rng(0)
ARRAYS = [
    RNG.integers(0, 256, (6, 28, 28)),
    RNG.integers(0, 10, 6),
    RNG.integers(0, 256, (4, 28, 28)),
    RNG.integers(0, 10, 4),
]
CONTENT = dict(zip(FASHION_MNIST.files, map(idx, ARRAYS), strict=True))
SMALL = dataclasses.replace(
    FASHION_MNIST,
    files={file: hashlib.sha256(content).hexdigest() for file, content in CONTENT.items()},
    size=sum(map(len, CONTENT.values())),
)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The data directory, empty, and a small Fashion-MNIST in the place of the real one."""
    monkeypatch.setenv("NUFED_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(downloads, "FIRST_BACKOFF", 0)
    monkeypatch.setattr(sources, "FASHION_MNIST", SMALL)
    monkeypatch.setitem(STORED, "fashion-mnist", SMALL)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def server(monkeypatch):
    """A web server; ``plan`` holds the statuses of the first requests."""
    monkeypatch.setenv("no_proxy", "*")
    files = {f"/mirror/{file.rpartition('/')[2]}": content for file, content in CONTENT.items()}
    state = SimpleNamespace(files=files, plan=[], asked=[])

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            state.asked.append(self.path)
            status = state.plan.pop(0) if state.plan else 200
            if status != 200 or self.path not in state.files:
                self.send_error(status if status != 200 else 404)
                return
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", str(len(state.files[self.path])))
            self.end_headers()
            self.wfile.write(state.files[self.path])

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}/mirror"
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


def left(directory):
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


@pytest.mark.parametrize("slash", ["", "/"])
def test_every_file_is_downloaded_and_checked(directory, server, slash):
    server.plan, seen = [200, 503], []
    url = server.url + slash
    assert downloads.fetch(SMALL, url=url, on_progress=lambda *at: seen.append(at))
    assert left(directory) == sorted(CONTENT)
    assert seen[0] == (0, SMALL.size) and seen[-1] == (SMALL.size, SMALL.size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(server.asked) == 5 and server.asked[1] == server.asked[2]
    assert not downloads.fetch(SMALL, url=url)


def test_a_wrong_file_is_refused_and_leaves_nothing(directory, server):
    server.files["/mirror/t10k-labels-idx1-ubyte.gz"] = b"<html>please log in</html>"
    with pytest.raises(
        InputError, match=r"SHA-256 of t10k-labels.* differs.*were removed"
    ) as caught:
        downloads.fetch(SMALL, url=server.url)
    assert not left(directory) and "\n" not in str(caught.value)


def test_files_of_a_directory_are_checked_and_copied(directory, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte.gz can't be read"):
        downloads.fetch(SMALL, archive=mine)
    for file, content in CONTENT.items():
        (mine / file.rpartition("/")[2]).write_bytes(content)
    (mine / "t10k-images-idx3-ubyte.gz").write_bytes(b"spoilt")
    with pytest.raises(
        InputError, match=r"t10k-images.* can't be used.*--from must name unchanged"
    ):
        downloads.fetch(SMALL, archive=mine)
    assert not left(directory)
    (mine / "t10k-images-idx3-ubyte.gz").write_bytes(CONTENT[[*CONTENT][2]])
    assert downloads.fetch(SMALL, archive=mine)
    assert left(directory) == sorted(CONTENT)


def test_a_file_is_given_itself_if_it_is_the_only_one(directory, tmp_path):
    (file,), name = SHAKESPEARE.files, tmp_path / "plays.txt"
    one = dataclasses.replace(SHAKESPEARE, files={file: hashlib.sha256(b"ALL:\nHo").hexdigest()})
    with pytest.raises(InputError, match=r"plays.txt: must be the file, or a directory that holds"):
        downloads.fetch(one, archive=name)
    name.write_bytes(b"ALL:\nHo")
    assert downloads.fetch(one, archive=name)
    assert (directory / file).read_bytes() == b"ALL:\nHo"
    with pytest.raises(InputError, match=r"plays.txt: must be a directory that holds train-images"):
        downloads.fetch(SMALL, archive=name)


def test_the_command(directory, server, nufed, tmp_path):
    result = nufed("data", "get", "fashion-mnist", "--url", server.url, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"fashion-mnist: {directory / 'fashion-mnist'}\n"
    assert "present" in nufed("data", "list", cwd=tmp_path).stdout


def test_fashion_mnist_is_read(directory):
    with pytest.raises(InputError, match=r"fashion-mnist is not here .*`nufed data get fashion-"):
        sources.fashion_mnist()
    for file, content in CONTENT.items():
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_bytes(content)
    samples = sources.fashion_mnist()
    assert samples.inputs.dtype == torch.uint8 and (samples.inputs.numpy() == ARRAYS[0]).all()
    assert samples.targets.tolist() == ARRAYS[1].tolist()
    assert samples.classes[0] == "T-shirt/top" and samples.classes[9] == "Ankle boot"
    everything = sources.fashion_mnist(part="all", pixels="symmetric")
    assert len(everything) == 10 and everything.targets[6:].tolist() == ARRAYS[3].tolist()
    assert everything.take(np.arange(10))[0].min() >= -1
    for arguments in ({"part": "both"}, {"pixels": "raw"}):
        with pytest.raises(InputError, match="must be"):
            sources.fashion_mnist(**arguments)
    (directory / next(iter(CONTENT))).write_bytes(b"spoilt")
    with pytest.raises(InputError, match="its SHA-256 differs"):
        sources.fashion_mnist()


def test_checksums_are_complete():
    assert all(len(sha256) == 64 for sha256 in FASHION_MNIST.files.values())
    assert FASHION_MNIST.size == 30_878_645
