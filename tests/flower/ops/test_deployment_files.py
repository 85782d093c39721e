"""The systemd units, the Dockerfile and the compose files of examples/deployment."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from nufed.flower.ops.site_runner import Health, health_file
from nufed.lab.cli.federate import federate_app

REPOSITORY = Path(__file__).parents[3]
FILES = REPOSITORY / "examples" / "deployment"
ROLES = ("server", "site")
MOST_EXPOSED = 1.5  # of 10, as systemd-analyze rates it
# what an administrator relies on; systemd-analyze weighs them all against each other
CONFINED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "CapabilityBoundingSet": "",
    "IPAddressDeny": "any",
    "MemoryMax": "8G",
    "UMask": "0077",
}


def tool(name):
    """The path of a program, beside Python's or on the PATH; skips the test without it."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def call(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def unit_of(role, folder):
    """The unit in ``folder``, with a program that exists here."""
    text = (FILES / "systemd" / f"nufed-{role}.service").read_text()
    assert text.count("/opt/nufed/bin/nufed ") == 1
    unit = folder / f"nufed-{role}.service"
    unit.write_text(text.replace("/opt/nufed/bin/nufed ", f"{sys.executable} "))
    return unit


def services(role):
    return yaml.safe_load((FILES / "docker" / f"compose.{role}.yaml").read_text())["services"]


@pytest.mark.parametrize("role", ROLES)
def test_systemd_accepts_the_units_and_rates_them_as_confined(role, tmp_path):
    unit, analyze = unit_of(role, tmp_path), tool("systemd-analyze")
    assert call(analyze, "verify", str(unit)) == ""
    limit = f"--threshold={round(10 * MOST_EXPOSED)}"
    call(analyze, "security", "--offline=true", "--no-pager", limit, str(unit))


@pytest.mark.parametrize("role", ROLES)
def test_units_have_the_confinement_that_the_documentation_names(role):
    lines = (FILES / "systemd" / f"nufed-{role}.service").read_text().splitlines()
    for key, value in CONFINED.items():
        assert f"{key}={value}" in lines
    assert f"User=nufed-{role}" in lines and f"StateDirectory=nufed-{role}" in lines


def test_the_dockerfile_passes_its_linter():
    assert call(tool("hadolint"), str(FILES / "docker" / "Dockerfile")) == ""


@pytest.mark.parametrize("role", ROLES)
def test_compose_accepts_the_compose_files(role):
    compose = [tool("docker"), "compose"]
    if subprocess.run([*compose, "version"], capture_output=True).returncode:
        compose = [tool("docker-compose")]
    call(*compose, "-f", str(FILES / "docker" / f"compose.{role}.yaml"), "config", "-q")


@pytest.mark.parametrize("role", ROLES)
def test_containers_are_confined(role):
    for name, service in services(role).items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"] and service["mem_limit"], name
        folders = [volume.split(":") for volume in service["volumes"]]
        written = [inside for _, inside, *mode in folders if mode != ["ro"]]
        assert written == ([] if name == "proxy" else ["/var/lib/nufed"])
    last_user = [line for line in dockerfile() if line.startswith("USER")][-1]
    assert last_user == "USER 10001:10001"


def dockerfile():
    return (FILES / "docker" / "Dockerfile").read_text().splitlines()


def test_a_site_is_healthy_as_long_as_it_is_connected(tmp_path):
    site = services("site")["site"]
    own = dict(option[2:].split("=") for option in site["command"][1:])
    file = health_file(Path(own["folder"]), int(own["number"]))
    kind, check = site["healthcheck"]["test"]
    assert kind == "CMD-SHELL" and str(file) in check

    def healthy():
        here = check.replace("$$", "$").replace(str(file), str(tmp_path / "file"))
        done = subprocess.run(["sh", "-c", here], stderr=subprocess.DEVNULL)
        return done.returncode == 0

    assert not healthy()
    health = Health(tmp_path / "file")
    health.polled()
    health.update()
    assert healthy()
    old = time.time() - 120
    os.utime(tmp_path / "file", (old, old))
    assert not healthy()


@pytest.mark.parametrize("role", ROLES)
def test_the_commands_in_the_files_are_commands_of_this_version(role):
    """Parsed as the command line does; a removed or renamed option fails."""
    *_, line = (FILES / "systemd" / f"{role}.env").read_text().splitlines()
    (assigned,) = shlex.split(line)
    options = shlex.split(assigned.removeprefix("OPTIONS="))
    command, *of_compose = services(role)[role]["command"]
    assert command == role and 'ENTRYPOINT ["nufed", "federate"]' in dockerfile()
    for arguments in (options, of_compose):
        get_command(federate_app).commands[role].make_context(role, list(arguments))
