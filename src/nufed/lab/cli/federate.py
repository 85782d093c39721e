"""The commands ``nufed federate …``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from nufed.errors import InputError
from nufed.lab.cli.terminal import print_table, say, table

SERVER = "127.0.0.1:8000"
KEYS = Path("keys")
APPLIES = "a running server applies it within seconds"

# the modules of nufed.flower are imported when a command runs: they need the extra `flower`
federate_app = typer.Typer(
    help="Run on Flower: data stays at its sites, only vectors and checked numbers travel.",
    no_args_is_help=True,
)

Keys = Annotated[
    Path, typer.Option(help="The server's folder of keys, which holds the registry sites.toml.")
]
KeyFile = Annotated[Path, typer.Argument(help="The site's public key, FILE.pub.")]
SiteName = Annotated[str, typer.Argument(help="The site's number or name.", metavar="SITE")]
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


@federate_app.callback()
def _needs_flower() -> None:
    if find_spec("flwr") is None:
        raise InputError('a federation needs Flower: install it with pip install "nufed[flower]"')


@federate_app.command()
def new(folder: Annotated[Path, typer.Argument(help="The directory to create.")]) -> None:
    """Create an app directory for a federation, with one function to fill in."""
    from nufed.flower.ops.local import new_app

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


@federate_app.command("register")
def register_site(
    key: KeyFile,
    number: Annotated[int, typer.Option(min=0, help="The site's number, from 0.")],
    name: Annotated[str, typer.Option(help="The site's name in results.")],
    keys: Keys = KEYS,
) -> None:
    """Register a site at the server: its number and name with its public key."""
    from nufed.flower.ops.registration import register_site

    shown = register_site(keys, number, name, key)
    say(f"registered: site {number} ({name!r}) with key {shown}; {APPLIES}")


@federate_app.command()
def rotate(
    site: SiteName,
    key: Annotated[Path | None, typer.Argument(help="The new public key, NEW.pub.")] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Revoke the old key, once the site uses the new one.")
    ] = False,
    keys: Keys = KEYS,
) -> None:
    """Replace a site's key without a gap: both are valid until --finish."""
    from nufed.flower.ops.registration import add_key, revoke_old_key

    if finish == (key is not None):
        raise InputError("give either the new key, NEW.pub, or --finish to revoke the old one")
    if key is not None:
        say(
            f"added: key {add_key(keys, site, key)}; start the site with it, then run `nufed "
            f"federate rotate {quote(site)} --finish --keys {quote(str(keys))}`; {APPLIES}"
        )
    else:
        say(f"revoked: the old key {revoke_old_key(keys, site)}; {APPLIES}")


@federate_app.command()
def revoke(site: SiteName, keys: Keys = KEYS) -> None:
    """Remove a site from the registry and revoke its keys, also during a run."""
    from nufed.flower.ops.registration import revoke_site

    revoked = revoke_site(keys, site)
    say(f"revoked: site {revoked.number} ({revoked.name!r}) and its keys; {APPLIES}")


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
def check(
    app: Annotated[Path, typer.Argument(help="The app's directory; its code is executed.")],
    data: Annotated[Path | None, typer.Option(help="The site's data, for its app.")] = None,
    number: Annotated[int, typer.Option(min=0, help="The site's number.")] = 0,
) -> None:
    """Try an app on a site's data, without a server: one training step, messages, memory."""
    from nufed.flower.app.check import check_site

    if data is not None and not data.exists():
        raise InputError(f"--data {data}: there is no such file or folder")
    for finding in check_site(app, data, number):
        say(str(finding))
    say("ok: this site could take part")


@federate_app.command()
def approve(
    app: Annotated[Path, typer.Argument(help="The app's directory, or its .fab file.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the site's state, as given to `site`.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Approve an app at a site, after showing how it differs from the last approved one."""
    from nufed.flower.app.site import default_folder
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
        from nufed.flower.app.check import check_configuration, load_app

        for finding in check_configuration(load_app(app)):
            say(str(finding))
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
    from nufed.flower.app.check import simulate_app
    from nufed.flower.ops.submit import report_of, run_directory

    say(f"report: {report_of(simulate_app(app, run_directory(app, out, resume), data))}")


@federate_app.command()
def status(
    run: Annotated[
        Path | None, typer.Argument(help="The run directory; default: the newest in runs/.")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Instead of a run, show the sites of the server with this folder."),
    ] = None,
    server: Annotated[str, typer.Option(help="The server's HOST:PORT, with --keys.")] = SERVER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run's state, on the server's machine: sites, round, who was left out and why."""
    if keys is not None:
        if run is not None:
            raise InputError("--keys is instead of a run directory: give one of them")
        _server_status(keys, server, as_json)
        return
    from nufed.flower.ops.status import HEADINGS, has_ended, is_gone, newest_run, site_row, summary
    from nufed.lab.runs.federation_records import read_status

    state = read_status(run or newest_run())
    if as_json:
        over = {"gone": is_gone(state), "ended": has_ended(state)}
        print(json.dumps({**state.model_dump(), **over}, indent=1))
        return
    for line in summary(state):
        say(line)
    print_table(table([site_row(site) for site in state.sites], HEADINGS))


def _server_status(keys: Path, server: str, as_json: bool) -> None:
    from nufed.flower.ops.status import SERVER_HEADINGS, connected_row, connected_sites

    sites = connected_sites(keys, server)
    if as_json:
        print(json.dumps([asdict(site) for site in sites], indent=1))
        return
    say(f"{sum(site.connected for site in sites)} of {len(sites)} registered sites connected")
    print_table(table([connected_row(site) for site in sites], SERVER_HEADINGS))


@federate_app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="A federation's run directory.")],
    head: Annotated[
        str | None,
        typer.Option(help="A head that was noted earlier: it must still be in the log."),
    ] = None,
) -> None:
    """Verify the audit log of a run, or name its first broken line."""
    from nufed.lab.runs.audit_log import AUDIT, audit as verify

    log = verify(run / AUDIT, head)
    events = log.events
    span = f" from {events[0]['time']} to {events[-1]['time']}" if events else ""
    say(f"{run / AUDIT}: {len(events)} lines{span}, the chain is intact; head: {log.head}")


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
