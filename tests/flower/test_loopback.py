"""One real federation on this machine: a SuperLink and two SuperNodes, over loopback only."""

from pathlib import Path

import pytest

from federate.small_app import files_of, simulate, write_app
from nufed.federate.local import run_locally


@pytest.mark.timeout(900)  # every message is a process that imports torch
def test_a_real_federation_leaves_the_simulators_files(tmp_path: Path):
    app = write_app(tmp_path / "app", sites=2, rounds=2)
    said = []
    report = run_locally(app, 2, tmp_path / "run", insecure=True, say=said.append)
    assert report.name == "report.html", said
    simulate(app, tmp_path / "simulated")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "simulated")
