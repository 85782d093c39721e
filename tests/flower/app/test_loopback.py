"""One real federation on this machine: a server and two sites, over loopback only."""

import pytest

from flower.ops.small_app import files_of, simulate, write_app
from nufed.flower.ops.local import run_locally


@pytest.mark.timeout(7200)  # a busy machine
def test_a_real_federation_leaves_the_simulators_files(tmp_path):
    app = write_app(tmp_path / "app", sites=2, rounds=2, deadline=120.0)
    out, said = tmp_path / "run", []
    report = run_locally(app, 2, out, insecure=True, say=said.append)
    assert report.name == "report.html", said
    simulate(app, tmp_path / "simulated")
    assert files_of(out) == files_of(tmp_path / "simulated"), said
