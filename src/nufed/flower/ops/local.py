"""A federation on this machine: a new app directory, and a server with all sites by one command."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

from nufed.errors import InputError
from nufed.flower.app.registry import SITES
from nufed.flower.ops.approvals import read_app
from nufed.flower.ops.flower_processes import flower, free_ports
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.registration import Admission, register_site
from nufed.flower.ops.site_runner import SiteOptions, make_folder, site_command
from nufed.flower.ops.submit import Monitoring, Say, check_app, follow
from nufed.flower.ops.superlink import start_superlink

# Python files have the suffix .txt in the template, so that tools do not import them
TEMPLATE = {
    "federation.toml": "federation.toml",
    "my_data.py": "my_data.py.txt",
    "app.py": "app.py.txt",
    "pyproject.toml": "pyproject.toml",
}


def new_app(folder: Path) -> None:
    """Write the files of an app that Flower can run; nothing is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: give another directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in TEMPLATE.items():
            text = (files("nufed.flower.ops") / "template" / source).read_text("utf-8")
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"{folder} can't be written ({error.strerror}): give another") from error


def run_locally(
    app: Path,
    sites: int,
    out: Path,
    *,
    insecure: bool,
    say: Say,
    data: str | None = None,
    monitoring: Monitoring = Monitoring(),
) -> Path:
    """Run an app with a SuperLink and sites as local processes; returns the path of the report.

    Keys are temporary. Logs and the sites' folders stay beside ``out``.
    """
    files = [data_of(data, number) for number in range(sites)]
    beside = out.with_name(f"{out.name}-federation")
    with flower() as commands:
        keys = None if insecure else commands.home / "keys"
        if keys is not None:
            make_authority(keys)
        folders = [beside / f"site-{number}" for number in range(sites)]
        for folder in (beside, *folders):
            make_folder(folder)
        (port,) = free_ports(1)
        _, link = start_superlink(commands, "127.0.0.1", port, keys, log=beside / "superlink.log")
        link.connect(commands)
        members = [
            SiteOptions(
                number,
                keys and keys / folder.name,
                folder.name,
                files[number],
                folder,
                log_format=monitoring.log_format,
            )
            for number, folder in enumerate(folders)
        ]
        if keys is not None:
            bundle = read_app(app)
            for site in members:
                assert site.key and site.name and site.approvals
                register_site(keys, site.number, site.name, make_site_key(site.key))
                site.approvals.add(bundle)
            Admission(link, commands.home, keys / SITES, say=lambda text: None).apply()
        nodes = {
            site.name: commands.start(*site_command(site, link), log=beside / f"{site.name}.log")
            for site in members
        }
        say(f"started a server at {link.address} and {sites} sites; logs: {beside}")

        def on_poll() -> None:
            for name, node in list(nodes.items()):
                if node.poll() is not None:
                    say(f"{name} exited (exit code {nodes.pop(name).returncode})")

        resume = f"nufed federate local {app} --resume {out}" + (
            f" --data '{data}'" if data else ""
        )
        return follow(commands, app, out, say, resume, on_poll, monitoring)


def data_of(data: str | None, number: int) -> Path | None:
    """The path of a site's data: ``data`` with ``{number}`` replaced by its number."""
    if data is None:
        return None
    path = Path(data.replace("{number}", str(number)))
    if not path.exists():
        raise InputError(f"--data {data}: {path} of site {number} does not exist")
    return path


def sites_of(app: Path) -> int:
    """The number of sites in an app's configuration."""
    check_app(app)
    path = app / "federation.toml"
    try:
        agents = tomllib.loads(path.read_text("utf-8"))["data"]["agents"]
    except (OSError, ValueError, KeyError, TypeError):
        agents = None
    if not isinstance(agents, int) or agents < 1:
        raise InputError(
            f"{path} has no valid data.agents: set it to the number of sites, or give --sites N"
        )
    return agents
