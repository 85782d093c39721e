"""A whole federation on this machine, with one command."""

from __future__ import annotations

import tomllib
from pathlib import Path

from nufed.errors import InputError
from nufed.federate.keys import make_authority, make_site_key
from nufed.federate.link import register
from nufed.federate.processes import flower, free_ports
from nufed.federate.run import Say, check_app, follow
from nufed.federate.server import start_superlink
from nufed.federate.site import Site, make_folder, supernode_command


def run_locally(
    app: Path, sites: int, out: Path, *, insecure: bool, say: Say, data: str | None = None
) -> Path:
    """Run an app on a SuperLink and sites that are processes of this machine; the report's path.

    Keys are made for it and removed. Logs and the sites' own folders stay beside ``out``.
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
        port, *ports = free_ports(1 + sites)
        _, link = start_superlink(commands, "127.0.0.1", port, keys, log=beside / "superlink.log")
        link.connect(commands)
        members = [
            Site(number, keys and keys / folder.name, folder.name, files[number], folder)
            for number, folder in enumerate(folders)
        ]
        register(commands, [make_site_key(site.key) for site in members if site.key])
        nodes = {
            site.name: commands.start(
                *supernode_command(site, link, own), log=beside / f"{site.name}.log"
            )
            for site, own in zip(members, ports, strict=True)
        }
        say(f"a server and {sites} sites are started at {link.address}; their logs: {beside}")

        def look() -> None:
            for name, node in list(nodes.items()):
                if node.poll() is not None:
                    say(f"{name} has ended (exit code {nodes.pop(name).returncode})")

        again = f"nufed federate local {app} --resume {out}" + (f" --data '{data}'" if data else "")
        return follow(commands, app, out, say, again, look)


def data_of(data: str | None, number: int) -> Path | None:
    """Where a site's data is: ``data``, with its number in the place of ``{number}``."""
    if data is None:
        return None
    path = Path(data.replace("{number}", str(number)))
    if not path.exists():
        raise InputError(f"--data {data}: there is no {path}, for site {number}")
    return path


def sites_of(app: Path) -> int:
    """How many sites an app's configuration asks for."""
    check_app(app)
    path = app / "federation.toml"
    try:
        agents = tomllib.loads(path.read_text("utf-8"))["data"]["agents"]
    except (OSError, ValueError, KeyError, TypeError):
        agents = None
    if not isinstance(agents, int) or agents < 1:
        raise InputError(f"{path} does not say how many sites there are: give --sites N")
    return agents
