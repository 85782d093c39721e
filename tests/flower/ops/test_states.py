"""Algorithms with agent states on real processes: bit-identical to simulation, states at sites."""

import pytest
import torch

from flower.ops.commands import TIMEOUT, nufed_federate
from flower.ops.small_app import files_of, simulate, write_app
from nufed.lab.files import read_sealed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("algorithm", ["scaffold", "ditto"])
def test_a_real_federation_gives_the_simulators_bits(tmp_path, algorithm):
    app = write_app(tmp_path / "app", 2, rounds=3)
    text = (app / "federation.toml").read_text()
    text = text.replace('curvature = "first_order"', f'algorithm = "{algorithm}"')
    (app / "federation.toml").write_text(text)
    with nufed_federate(tmp_path, "local", "app", "--out", "run", "--insecure") as process:
        assert process.wait(TIMEOUT) == 0, process.printed()
    simulate(app, tmp_path / "simulated")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "simulated")
    assert not list((tmp_path / "run").rglob("states")) and not list(
        (tmp_path / "run").rglob("personal")
    )
    (part,) = (tmp_path / "simulated").glob("methods/*/seed-0")
    for number in range(2):
        (kept,) = (tmp_path / "run-federation" / f"site-{number}").rglob("personal/*.safetensors")
        right = read_sealed(part / "personal" / f"{number}.safetensors")
        assert torch.equal(read_sealed(kept).tensors["model"], right.tensors["model"])
