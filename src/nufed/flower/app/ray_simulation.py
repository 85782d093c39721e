"""Runs a federation's apps in Flower's Ray-based simulation on this machine.

nufed's simulator is much faster and bit-identical; this is for testing an app as Flower runs it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.simulation import run_simulation

from nufed.flower.app.load_app import load_app
from nufed.flower.app.site import PARTITION_ID, Load

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: listen on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; avoids a warning
}


def simulate_app(folder: Path, out: Path, data: str | None = None) -> Path:
    """Run the app in ``folder`` with its configured number of sites; returns the run directory.

    ``data`` is the path of a site's data; ``{number}`` in it stands for the site's number.
    """
    federation = load_app(folder)
    if data is not None:
        federation = replace(federation, load=_from(federation.load, str(Path(data).absolute())))
    sites = federation.checked.data.agents
    paths = os.pathsep.join((str(folder.resolve()), os.environ.get("PYTHONPATH", "")))
    os.environ.update(RAY | {"PYTHONPATH": paths})  # Ray's processes import the app too
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # Ray's sockets need a short path
        os.environ.setdefault("RAY_TMPDIR", short)
        run_simulation(
            federation.serving(out),
            federation.site,
            sites,
            backend_config={"client_resources": {"num_cpus": 1}},
        )
    return out


def _from(load: Load, data: str) -> Load:
    """``load`` with each site's data path filled in."""

    def load_numbered(site: Mapping[str, Any]) -> Any:
        return load({**site, "data": data.replace("{number}", str(site[PARTITION_ID]))})

    return load_numbered
