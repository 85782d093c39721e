"""The image and the units in a clean Debian: built by buildah, booted by systemd-nspawn.

``make test-deployment`` runs it, as root, with access to Debian's archive and a package index.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from nufed.flower.ops.local import new_app

REPOSITORY = Path(__file__).parents[3]
DEPLOYMENT = REPOSITORY / "examples" / "deployment"
TOOLS = ("debootstrap", "buildah", "systemd-nspawn", "setpriv")
PACKAGES = "python3,python3-venv,systemd,dbus"  # Python as in the base image, systemd for the units
BASE = "docker.io/library/python:3.11-slim-bookworm"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif("NUFED_DEPLOYMENT" not in os.environ, reason="run by make test-deployment"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)), reason=f"needs all of {', '.join(TOOLS)}"
    ),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="needs the image's Python, 3.11"),
]


def call(*command, **more):
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The root of a container of the image, made by the Dockerfile's own steps."""
    folder = tmp_path_factory.mktemp("machine")
    context, wheels = folder / "context", folder / "wheels"
    pip = (sys.executable, "-m", "pip")
    call(*pip, "wheel", "--no-deps", "--wheel-dir", context, REPOSITORY)
    for file in (REPOSITORY / "constraints.txt", DEPLOYMENT / "docker" / "Dockerfile"):
        shutil.copy(file, context)
    (wheel,) = context.glob("*.whl")
    constraints = ("--constraint", context / "constraints.txt")
    call(*pip, "wheel", "--wheel-dir", wheels, *constraints, f"{wheel}[flower,privacy]")
    (folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    call("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder / "base")
    (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    storage = ("--root", folder / "storage", "--runroot", folder / "runroot")
    environment = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def buildah(command, *arguments):
        """What it prints last: the name or the place of what was made."""
        printed = call("buildah", *storage, command, *arguments, env=environment)
        return printed.rpartition("\n")[0].rpartition("\n")[2].strip()

    signed = ("--signature-policy", folder / "policy.json")
    scratch = buildah("from", "scratch")
    buildah("copy", "--quiet", scratch, folder / "base", "/")
    buildah("commit", *signed, "--quiet", scratch, BASE)
    mounts = ("-v", f"{wheels}:/wheels:ro", "-v", f"{folder / 'pip.conf'}:/etc/pip.conf:ro")
    buildah("bud", *signed, "--pull-never", "--format", "docker", *mounts, "-t", "nufed", context)
    container = buildah("from", *signed, "--pull-never", "localhost/nufed")
    root = Path(buildah("mount", container))
    app = root / "srv" / "ours"
    new_app(app)
    text = (app / "federation.toml").read_text()
    text = text.replace("rounds = 20", "rounds = 2").replace("agents = 4", "agents = 1")
    (app / "federation.toml").write_text(text)
    inputs = np.random.default_rng(0).normal(size=(200, 64))
    np.savez(root / "srv" / "ward3.npz", inputs=inputs, targets=(inputs[:, 0] > 0).astype(int))
    yield SimpleNamespace(root=root, folder=folder)
    call("buildah", *storage, "rm", container, env=environment)


IN_IMAGE = """
set -e
ip link set lo up
mount --bind {root} {root}
mount -o remount,bind,ro {root}
mount -t proc proc {root}/proc
mount --bind /dev {root}/dev
mount -t tmpfs tmpfs {root}/tmp
mount -t tmpfs -o uid=10001,gid=10001,mode=0700 tmpfs {root}/var/lib/nufed
exec env -i PATH=/opt/nufed/bin:/usr/sbin:/usr/bin:/bin HOME=/var/lib/nufed chroot {root} \\
  setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all \\
  bash -c {script}
"""


def in_image(root, script):
    """What a script prints that runs as in a container with the options of the compose file."""
    steps = IN_IMAGE.format(root=root, script=shlex.quote(script))
    own = ("--mount", "--net", "--pid", "--fork", "--kill-child")
    return call("unshare", *own, "bash", "-c", steps)


def health_check(role):
    text = (DEPLOYMENT / "docker" / f"compose.{role}.yaml").read_text()
    return yaml.safe_load(text)["services"][role]["healthcheck"]["test"]


def test_the_image_runs_a_federation_as_its_user_on_a_read_only_root(machine):
    _, *health = health_check("server")
    (machine.root / "health.py").write_text(
        f"import subprocess, sys; sys.exit(subprocess.call({health!r}))"
    )
    _, health = health_check("site")
    (machine.root / "site-health.sh").write_text(health.replace("$$", "$"))
    printed = in_image(
        machine.root,
        """
        cd /var/lib/nufed
        ! touch /x 2> /dev/null && ! touch /opt/nufed/x 2> /dev/null && id -u
        ! python3 /health.py 2> /dev/null && echo not healthy yet
        nufed federate server --insecure > server.log 2>&1 &
        for i in $(seq 120); do grep -q "server is ready" server.log && break; sleep 1; done
        python3 /health.py && echo healthy
        own="--number 0 --data /srv/ward3.npz --folder state"
        ! sh /site-health.sh 2> /dev/null && echo site not healthy yet
        nufed federate site --insecure $own > site.log 2>&1 &
        for i in $(seq 120); do sh /site-health.sh 2> /dev/null && break; sleep 1; done
        sh /site-health.sh && echo site healthy
        nufed federate run /srv/ours --insecure --out run 2>&1 || cat server.log site.log
        """,
    )
    health = "not healthy yet\nhealthy\nsite not healthy yet\nsite healthy\n"
    assert printed.startswith(f"10001\n{health}"), printed
    assert printed.endswith("report: run/report.html\n"), printed


TRIAL = """#!/bin/bash
exec > /trial.log 2>&1
systemctl start nufed-server nufed-site
for i in $(seq 120); do
  journalctl -b -u nufed-server | grep -q "server is ready" && break
  sleep 1
done
cd /var/lib/nufed-server
runuser -u nufed-server -- /opt/nufed/bin/nufed federate run /srv/ours \\
  --ca /etc/nufed-server/keys/ca.crt --out /var/lib/nufed-server/run || journalctl -b -u 'nufed-*'
for unit in nufed-server nufed-site; do
  main=$(systemctl show $unit -p MainPID --value)
  grep -E "^(NoNewPrivs|Seccomp|CapBnd):" /proc/$main/status
  for place in /srv /etc /usr /opt/nufed /var; do
    nsenter -t $main -m touch $place/x 2> /dev/null && echo "$unit can write to $place"
  done
  nsenter -t $main -m touch /var/lib/$unit/x && echo "$unit can write to its folder"
done
systemctl stop nufed-server nufed-site
systemctl show nufed-server nufed-site -p Result -p ExecMainStatus --value
"""
TRIAL_UNIT = """[Unit]
After=basic.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart=/trial.sh
"""
SETUP = """
set -e
for role in server site; do
  useradd --system --home-dir /var/lib/nufed-$role --shell /usr/sbin/nologin nufed-$role
  install -d -o nufed-$role -m 0700 /etc/nufed-$role
done
nufed federate keys /etc/nufed-server/keys
nufed federate key /etc/nufed-site/site.key
cd /etc/nufed-server
nufed federate register /etc/nufed-site/site.key.pub --number 0 --name "Ward 3"
cp /etc/nufed-server/keys/ca.crt /etc/nufed-site/
cp /options/server.env /etc/nufed-server/options.env
sed s/fed.example.org:443/127.0.0.1:8000/ /options/site.env > /etc/nufed-site/options.env
install -d -o nufed-site -m 0700 /var/lib/nufed-site
nufed federate approve /srv/ours --folder /var/lib/nufed-site/state --yes
for role in server site; do chown -R nufed-$role: /etc/nufed-$role; done
chown -R nufed-site: /var/lib/nufed-site
"""


def test_the_units_run_a_federation_under_systemd_confined(machine):
    root, units = machine.root, machine.root / "etc" / "systemd" / "system"
    shutil.copytree(DEPLOYMENT / "systemd", root / "options")
    environment = {"PATH": "/opt/nufed/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    call("chroot", root, "bash", "-c", SETUP, env=environment)
    for unit in (root / "options").glob("*.service"):
        shutil.copy(unit, units)
    (root / "trial.sh").write_text(TRIAL)
    (root / "trial.sh").chmod(0o755)
    (units / "trial.service").write_text(TRIAL_UNIT)
    container = ("--register=no", "--keep-unit", "--private-network")
    call("systemd-nspawn", "-D", root, *container, "--boot", "systemd.unit=trial.service")
    printed = (root / "trial.log").read_text()
    assert "report: /var/lib/nufed-server/run/report.html" in printed, printed
    assert printed.count("NoNewPrivs:\t1") == printed.count("Seccomp:\t2") == 2, printed
    assert printed.count("CapBnd:\t0000000000000000") == 2, printed
    told = [line for line in printed.splitlines() if "can write to" in line]
    assert told == [f"nufed-{role} can write to its folder" for role in ("server", "site")]
    assert sorted(printed.split()[-4:]) == ["0", "0", "success", "success"], printed
