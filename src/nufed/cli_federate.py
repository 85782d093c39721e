"""The commands ``nufed federate …``: parsing and printing only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from nufed.errors import InputError
from nufed.terminal import say

# What is behind these commands is imported where it is used: it needs the extra `flower`.

federate_app = typer.Typer(
    help="Run on Flower: data stays at its sites, only vectors and checked numbers travel.",
    no_args_is_help=True,
)

App = Annotated[Path, typer.Argument(help="The app's directory, with its pyproject.toml.")]
Server = Annotated[str, typer.Option(help="The server's HOST:PORT.")]
Ca = Annotated[Path | None, typer.Option(help="ca.crt, by which the server is known.")]
Out = Annotated[Path | None, typer.Option(help="The run directory to make.")]
Resume = Annotated[Path | None, typer.Option(help="Go on with this run directory.")]
AllData = Annotated[
    str | None, typer.Option(help="The sites' data; {number} stands for a site's number.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No encryption, no keys: on this machine only.")
]
SERVER = "127.0.0.1:8000"


@federate_app.callback()
def _needs_flower() -> None:
    if find_spec("flwr") is None:
        raise InputError('a federation needs Flower: install it with pip install "nufed[flower]"')


@federate_app.command()
def new(folder: Annotated[Path, typer.Argument(help="Where to write it.")]) -> None:
    """Make the directory of a federation's app, with one function to fill in."""
    from nufed.federate.new import new_app

    new_app(folder)
    say(f"app: {folder}; fill in my_data.py and federation.toml")


@federate_app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the server; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they hold.")] = 365,
) -> None:
    """Make the server's certificate, and the authority by which sites know it."""
    from nufed.federate.keys import CA, CA_KEY, make_authority

    make_authority(folder, host or (), days)
    say(f"certificates: {folder}; give {CA} to every site, keep {CA_KEY} away from the server")


@federate_app.command()
def key(file: Annotated[Path, typer.Argument(help="Where to write it.")]) -> None:
    """Make a site's own key pair, at the site; only FILE.pub leaves it."""
    from nufed.federate.keys import make_site_key

    say(f"key: {file}; send only {make_site_key(file)} to whoever runs the server")


@federate_app.command()
def server(
    keys: Annotated[
        Path | None, typer.Option(help="The folder that `nufed federate keys` made.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    site_key: Annotated[
        list[Path] | None, typer.Option(help="A site's public key; may be repeated.")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Run the server (Flower's SuperLink) until Ctrl-C; only sites with these keys get in."""
    from nufed.federate.server import serve

    with _until_interrupted():
        serve(host, port, keys, site_key or (), insecure=insecure, say=_say)


@federate_app.command()
def register(
    site_key: Annotated[Path, typer.Argument(help="A site's public key, FILE.pub.")],
    server: Server = SERVER,
    ca: Ca = None,
) -> None:
    """Let one more site into the server that runs, until it ends."""
    from nufed.federate.link import existing, link_to
    from nufed.federate.link import register as register_keys
    from nufed.federate.processes import flower

    link, public = link_to(server, ca, insecure=False), existing(site_key, "the key")
    with flower() as commands:
        link.connect(commands)
        register_keys(commands, [public])
    say(f"registered: {site_key}; give it as --site-key too when the server is started again")


@federate_app.command()
def site(
    number: Annotated[int, typer.Option(min=0, help="The site's own number, from 0.")],
    server: Server = SERVER,
    ca: Ca = None,
    key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
    name: Annotated[str | None, typer.Option(help="What the site is called in results.")] = None,
    data: Annotated[Path | None, typer.Option(help="The site's data, for its app.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the site keeps its state.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Most privacy to spend against the server, in all.")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Take part as a site (Flower's SuperNode) until Ctrl-C."""
    from nufed.federate.link import link_to
    from nufed.federate.site import Site, attend

    with _until_interrupted():
        attend(Site(number, key, name, data, folder, epsilon), link_to(server, ca, insecure), _say)


@federate_app.command()
def run(
    app: App,
    out: Out = None,
    resume: Resume = None,
    server: Server = SERVER,
    ca: Ca = None,
    insecure: Insecure = False,
) -> None:
    """Train with the sites of a server; start it on the server's machine."""
    from nufed.federate.link import link_to
    from nufed.federate.run import run_app, run_directory

    link = link_to(server, ca, insecure)
    with _stopped_in_words():
        say(f"report: {run_app(app, run_directory(app, out, resume), link, _say)}")


@federate_app.command()
def local(
    app: App,
    sites: Annotated[
        int | None, typer.Option(min=1, help="How many; by default as federation.toml says.")
    ] = None,
    data: AllData = None,
    out: Out = None,
    resume: Resume = None,
    insecure: Insecure = False,
) -> None:
    """Start a server and all sites on this machine, train, and end them again."""
    from nufed.federate.local import run_locally, sites_of
    from nufed.federate.run import run_directory

    number = sites or sites_of(app)
    with _stopped_in_words():
        place = run_directory(app, out, resume)
        report = run_locally(app, number, place, insecure=insecure, say=_say, data=data)
        say(f"report: {report}")


@federate_app.command()
def simulate(app: App, data: AllData = None, out: Out = None, resume: Resume = None) -> None:
    """Try the app in Flower's own simulation on this machine, which needs Ray."""
    if find_spec("ray") is None:
        raise InputError(
            'Flower\'s simulation needs Ray: install it with pip install "nufed[ray]", or use '
            "`nufed federate local`, which does without"
        )
    from nufed.federate.run import report_of, run_directory
    from nufed.flower.simulation import simulate_app

    say(f"report: {report_of(simulate_app(app, run_directory(app, out, resume), data))}")


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """Ctrl-C is how a server or a site is ended."""
    try:
        yield
    except KeyboardInterrupt:
        _say("ended")


@contextmanager
def _stopped_in_words() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stopped:
        _say(str(stopped) or "stopped")
        raise typer.Exit(130) from None


def _say(text: str) -> None:
    say(text, error=True)
