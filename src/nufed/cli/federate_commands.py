"""The commands ``nufed federate …``: parsing and printing only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from nufed.cli.federate_monitoring import SERVER, check, status
from nufed.cli.terminal import say
from nufed.errors import InputError

# Implementations are imported lazily: they need the extra `flower`.

federate_app = typer.Typer(
    help="Run on Flower: data stays at its sites, only vectors and checked numbers travel.",
    no_args_is_help=True,
)

App = Annotated[Path, typer.Argument(help="The app's directory, with its pyproject.toml.")]
Server = Annotated[str, typer.Option(help="The server's HOST:PORT.")]
Ca = Annotated[Path | None, typer.Option(help="ca.crt, which authenticates the server.")]
Out = Annotated[Path | None, typer.Option(help="The run directory to create.")]
Resume = Annotated[Path | None, typer.Option(help="Resume this run directory.")]
AllData = Annotated[
    str | None, typer.Option(help="Path of the sites' data; {number} stands for a site's number.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No encryption, no keys: this machine only.")
]
LogFormat = Annotated[str, typer.Option(help="Of log lines: text or json (JSON Lines).")]
MetricsPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Serve metrics for Prometheus on this port of loopback."),
]

federate_app.command()(check)
federate_app.command()(status)


@federate_app.callback()
def _needs_flower() -> None:
    if find_spec("flwr") is None:
        raise InputError('a federation needs Flower: install it with pip install "nufed[flower]"')


@federate_app.command()
def new(folder: Annotated[Path, typer.Argument(help="The directory to create.")]) -> None:
    """Create an app directory for a federation, with one function to fill in."""
    from nufed.flower.ops.new_app import new_app

    new_app(folder)
    say(f"app: {folder}; fill in my_data.py and federation.toml")


@federate_app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="The output folder.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A host name or address of the server; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days of validity.")] = 365,
) -> None:
    """Make the server's certificate, and the CA that authenticates it to sites."""
    from nufed.flower.ops.keys import CA, CA_KEY, make_authority

    make_authority(folder, host or (), days)
    say(f"certificates: {folder}; give {CA} to every site, keep {CA_KEY} away from the server")


@federate_app.command()
def key(file: Annotated[Path, typer.Argument(help="The private key to write.")]) -> None:
    """Make a site's key pair, at the site; only FILE.pub leaves it."""
    from nufed.flower.ops.keys import make_site_key

    say(f"key: {file}; send only {make_site_key(file)} to the server's operator")


@federate_app.command()
def server(
    keys: Annotated[
        Path | None, typer.Option(help="The folder that `nufed federate keys` made.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    insecure: Insecure = False,
    without_proxy: Annotated[
        bool,
        typer.Option("--without-proxy", help="Listen beyond loopback without a proxy in front."),
    ] = False,
    log_format: LogFormat = "text",
) -> None:
    """Run the server (Flower's SuperLink) until Ctrl-C; admits only registered sites."""
    from nufed.flower.logs import as_format
    from nufed.flower.ops.superlink import serve

    form = as_format(log_format)
    with _until_interrupted():
        options = {"insecure": insecure, "without_proxy": without_proxy}
        serve(host, port, keys, **options, say=_say, log_format=form)


@federate_app.command()
def site(
    number: Annotated[int, typer.Option(min=0, help="The site's number, from 0.")],
    server: Server = SERVER,
    ca: Ca = None,
    key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
    name: Annotated[str | None, typer.Option(help="The site's name, without keys.")] = None,
    data: Annotated[Path | None, typer.Option(help="The site's data, for its app.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of the site's state.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Budget of ε against the server, over all runs.")
    ] = None,
    insecure: Insecure = False,
    any_app: Annotated[
        bool, typer.Option("--any-app", help="Run apps that this site has not approved, too.")
    ] = False,
    log_format: LogFormat = "text",
    metrics_port: MetricsPort = None,
) -> None:
    """Run a site until Ctrl-C; with a key it runs only apps that `approve` approved."""
    from nufed.flower.logs import as_format
    from nufed.flower.ops.link import link_to
    from nufed.flower.ops.site_runner import SiteOptions, run_site

    form = as_format(log_format)
    with _until_interrupted():
        run_site(
            SiteOptions(number, key, name, data, folder, epsilon, any_app, form, metrics_port),
            link_to(server, ca, insecure),
            _say,
        )


@federate_app.command()
def approve(
    app: Annotated[Path, typer.Argument(help="The app's directory, or its .fab file.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the site's state, as given to `site`.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Approve an app at a site, after showing how it differs from the last approved one."""
    from nufed.flower.app.site_store import default_folder
    from nufed.flower.ops.approvals import Approvals, read_app

    approvals, bundle = Approvals.of_site(folder or default_folder()), read_app(app)
    for line in approvals.diff(bundle):
        say(line)
    if not yes:
        typer.confirm("Approve this app?", abort=True)
    say(f"approved: {approvals.add(bundle)}")


@federate_app.command()
def run(
    app: App,
    out: Out = None,
    resume: Resume = None,
    server: Server = SERVER,
    ca: Ca = None,
    insecure: Insecure = False,
    log_format: LogFormat = "text",
    metrics_port: MetricsPort = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Only check the configuration, and predict ε.")
    ] = False,
) -> None:
    """Train with the sites of a server; run this on the server's machine."""
    from nufed.flower.logs import as_format
    from nufed.flower.ops.link import link_to
    from nufed.flower.ops.submit import Monitoring, run_app, run_directory

    if dry:
        from nufed.flower.app.check import check_configuration
        from nufed.flower.app.load_app import load_app

        for found in check_configuration(load_app(app)):
            say(str(found))
        return
    link = link_to(server, ca, insecure)
    monitoring = Monitoring(as_format(log_format), metrics_port)
    with _report_interrupt():
        place = run_directory(app, out, resume)
        say(f"report: {run_app(app, place, link, _say, monitoring)}")


@federate_app.command()
def local(
    app: App,
    sites: Annotated[
        int | None, typer.Option(min=1, help="Number of sites; default: as in federation.toml.")
    ] = None,
    data: AllData = None,
    out: Out = None,
    resume: Resume = None,
    insecure: Insecure = False,
    log_format: LogFormat = "text",
    metrics_port: MetricsPort = None,
) -> None:
    """Start a server and all sites on this machine, train, and stop them."""
    from nufed.flower.logs import as_format
    from nufed.flower.ops.local import run_locally, sites_of
    from nufed.flower.ops.submit import Monitoring, run_directory

    number = sites or sites_of(app)
    watched = {"monitoring": Monitoring(as_format(log_format), metrics_port)}
    with _report_interrupt():
        place = run_directory(app, out, resume)
        report = run_locally(app, number, place, insecure=insecure, say=_say, data=data, **watched)
        say(f"report: {report}")


@federate_app.command()
def simulate(app: App, data: AllData = None, out: Out = None, resume: Resume = None) -> None:
    """Run the app in Flower's Ray-based simulation on this machine."""
    if find_spec("ray") is None:
        raise InputError(
            'Flower\'s simulation needs Ray: install it with pip install "nufed[flower,ray]", or '
            "use `nufed federate local`, which does not need it"
        )
    from nufed.flower.app.ray_simulation import simulate_app
    from nufed.flower.ops.submit import report_of, run_directory

    say(f"report: {report_of(simulate_app(app, run_directory(app, out, resume), data))}")


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """Exit normally on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        _say("stopped")


@contextmanager
def _report_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stopped:
        _say(str(stopped) or "stopped")
        raise typer.Exit(130) from None


def _say(text: str) -> None:
    say(text, error=True)
