"""Settings that every test shares."""

import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from support import report_without_figures, with_figures, without_report

# importing it registers a device, after which processes can't be forked: tests/accelerated only
collect_ignore = ["accelerator.py"]

# `make test` runs the same examples every time; `make test-slow` searches for new ones
# neither depends on the machine's speed
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=60, **UNTIMED)
settings.register_profile("search", max_examples=1000, **UNTIMED)
settings.load_profile(os.environ.get("NUFED_HYPOTHESIS", "repeatable"))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """What is imported and collected stays: the garbage collector need not look at it."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Tests of whole programs first: no long one is left to a single worker at the end."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture
def nufed(monkeypatch, capsys):
    """Runs the command line in this process."""

    from nufed.lab import cli

    def call(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["nufed", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=exit.value.code or 0, stdout=out, stderr=err)

    return call


@pytest.fixture(scope="session", autouse=True)
def _quick_runs():
    """Leave out what takes most of the time of a small run and what few tests look at.

    * fsync matters only after a power failure, which no test simulates. fstat in its place still
      refuses a closed file; :data:`support.FSYNC` is the real one.
    * Reports are written without SVG and PNG files, except with the fixture ``figures`` or inside
      :func:`support.with_figures`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        patch.setattr("nufed.lab.report.run_page.build_report", report_without_figures)
        yield


@pytest.fixture
def figures():
    with with_figures():
        yield


@pytest.fixture
def no_report():
    with without_report():
        yield


@pytest.fixture(scope="session")
def data_directory():
    """A directory with the real data sets; without one the test is skipped.

    It is the one that NUFED_DATA names, or is unpacked from the data beside the repository.
    """
    given = os.environ.get("NUFED_DATA")
    if given:
        return Path(given)
    repository = Path(__file__).parents[1]
    shared, unpacked = repository.parent / "shared" / "data", repository / ".data"
    if not (shared / "unpack.py").exists():
        pytest.skip("set NUFED_DATA to a directory made by `nufed data get cifar10`")
    unpacked.mkdir(exist_ok=True)
    with (unpacked / "lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (unpacked / "complete").exists():
            subprocess.run([sys.executable, shared / "unpack.py", unpacked], check=True)
            (unpacked / "complete").touch()
        links = {name: name for name in ("mnist_by_writer.npz", "omniglot.npz")}
        links |= {
            "tinyshakespeare/input.txt": "shakespeare.txt",
            "clinc150/data_full.json": "clinc150.json",
            "clinc150/domains.json": "clinc150_domains.json",
        }
        for name, of in links.items():
            if not (unpacked / name).exists():
                (unpacked / name).unlink(missing_ok=True)  # a link to nowhere
                (unpacked / name).parent.mkdir(exist_ok=True)
                (unpacked / name).symlink_to(shared / of)
    return unpacked


@pytest.fixture
def real_data(data_directory, monkeypatch):
    """The real data sets, in nufed's data directory."""
    monkeypatch.setenv("NUFED_DATA", str(data_directory))
    return data_directory


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


looked_at = {}  # modules that no test wrote


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory, monkeypatch):
    """Forget the modules that a test wrote and imported: the next test may use the same name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    written = str(tmp_path_factory.getbasetemp())
    now = sys.modules.copy()  # threads may import meanwhile
    for name, module in [(n, m) for n, m in now.items() if looked_at.get(n) is not m]:
        if (getattr(module, "__file__", None) or "").startswith(written):
            del sys.modules[name]
        else:
            looked_at[name] = module
