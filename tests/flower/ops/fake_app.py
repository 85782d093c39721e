"""An app whose server writes a run's files without sending requests to sites."""

PROJECT = """
[project]
name = "fake"
version = "1.0.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "nufed"

[tool.flwr.app.components]
serverapp = "fake.app:server"
clientapp = "fake.app:site"

[tool.flwr.app.config]
out = ""
"""
APP = """
import os
import time
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
site = ClientApp()


@server.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    part = out / "methods" / "fake" / "seed-0"
    part.mkdir(parents=True, exist_ok=True)
    (out / "run.json").touch()
    while len(list(grid.get_node_ids())) < {sites}:
        time.sleep(0.2)

    def say(text):
        with (out / "log.txt").open("a") as log:
            log.write(text + chr(10))

    say("round 1, process " + str(os.getpid()))
{then}


def finish(out, part):
    (part / "done.json").touch()
    (out / "report.html").touch()


def fail(out, part):
    from nufed.lab.files import write_sealed

    write_sealed(part / "failure.json", {{"reason": "no site came within 3 seconds"}})
    raise RuntimeError("training ended")
"""
FOREVER = "time.sleep(600)"


def write_app(folder, then, sites=1):
    """An app that waits for its sites, then runs ``then``."""
    (folder / "fake").mkdir(parents=True)
    (folder / "fake" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "federation.toml").write_text(f"[data]\nagents = {sites}\n")
    (folder / "fake" / "app.py").write_text(APP.format(sites=sites, then=f"    {then}"))
    return folder
