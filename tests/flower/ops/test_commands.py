"""The commands that are started, and input refused before any is."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nufed.errors import InputError, RunError
from nufed.flower.ops import submit
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.link import Link, error_message
from nufed.flower.ops.local import data_of, sites_of
from nufed.flower.ops.site_runner import SiteOptions, site_command
from nufed.flower.ops.submit import Tail, failures, report_of, wait_for_server
from nufed.flower.ops.superlink import superlink_command
from nufed.lab.files import write_sealed

SECURE, OPEN = Link("fed.example.org:8000", Path("/k/ca.crt")), Link("127.0.0.1:8000", None)


def options(command):
    """Each option with the argument after it."""
    pairs = zip(command, [*command[1:], ""], strict=True)
    return {word: after for word, after in pairs if word.startswith("--")}


def test_a_server_requires_encryption_and_keys_unless_insecure():
    secure = options(superlink_command("0.0.0.0", 8000, Path("/k")))
    assert secure["--ssl-ca-certfile"] == "/k/ca.crt"
    assert secure["--ssl-certfile"] == "/k/server.crt"
    assert secure["--ssl-keyfile"] == "/k/server.key"
    assert "--enable-supernode-auth" in secure and "--insecure" not in secure
    plain = options(superlink_command("127.0.0.1", 9000, None))
    assert "--insecure" in plain and "--enable-supernode-auth" not in plain
    for command in (secure, plain):
        assert "--disable-runtime-dependency-installation" in command


def test_a_site_authenticates_with_its_key():
    given = json.loads(site_command(SiteOptions(3, Path("/s/key")), SECURE)[-1])
    assert given["server"] == "fed.example.org:8000"
    assert given["ca"] == "/k/ca.crt" and given["key"] == "/s/key"
    plain = json.loads(site_command(SiteOptions(3, None), OPEN)[-1])
    assert plain["ca"] is None and plain["key"] is None


@pytest.mark.parametrize("name", ["ward 3", "a=b c=d", "it's", "back\\slash", "läb"])
def test_a_site_s_process_gets_its_node_config_unchanged(name):
    site = SiteOptions(3, None, name, Path("/data") / name, Path("/state") / name, 20.0)
    assert json.loads(site_command(site, OPEN)[-1])["node_config"] == {
        "partition-id": 3,
        "epsilon": 20.0,
        "name": name,
        "data": f"/data/{name}",
        "folder": f"/state/{name}",
    }
    assert SiteOptions(0, Path("/s/key")).config() == {"partition-id": 0, "key": "/s/key"}
    assert SiteOptions(0, None).config() == {"partition-id": 0}


def test_a_name_with_control_characters_is_refused():
    with pytest.raises(InputError, match="must be printable"):
        SiteOptions(0, None, "two\nlines").config()


def test_a_log_is_followed_in_complete_lines(tmp_path):
    path, shown = tmp_path / "log.txt", []
    path.write_text("before\n")
    tail, other = Tail(path), Tail(tmp_path / "none")
    for text in ("one\ntw", "o\n", "", "three"):
        with path.open("a") as file:
            file.write(text)
        tail.show(shown.append)
    other.show(shown.append)
    assert shown == ["one", "two"]


def test_the_reasons_of_a_failure_and_the_report_are_found(tmp_path):
    part = tmp_path / "methods" / "fo" / "seed-1"
    part.mkdir(parents=True)
    assert failures(tmp_path) == []
    write_sealed(part / "failure.json", {"reason": "no site came"})
    ((path, _, reason),) = failures(tmp_path)
    assert path == part / "failure.json" and reason == "no site came"
    (part / "done.json").touch()
    assert report_of(tmp_path) == tmp_path
    (tmp_path / "report.html").touch()
    assert report_of(tmp_path) == tmp_path / "report.html"


def test_a_run_waits_for_a_server_that_is_starting_and_says_so(monkeypatch):
    answers, said = [False, False, False, True], []
    monkeypatch.setattr(submit, "is_listening", lambda host, port: answers.pop(0))
    wait_for_server(OPEN, said.append)
    assert not answers and len(said) == 1
    assert said[0].startswith("nothing listens at 127.0.0.1:8000: waiting up to 60 seconds")
    monkeypatch.setattr(submit, "is_listening", lambda host, port: True)
    wait_for_server(OPEN, said.append)
    assert len(said) == 1  # a server that is ready needs no word
    monkeypatch.setattr(submit, "is_listening", lambda host, port: False)
    with pytest.raises(RunError, match="after 0 seconds: start the server with `nufed federate"):
        wait_for_server(OPEN, said.append, seconds=0)


def test_flowers_error_messages_are_shown_without_boxes():
    boxed = "Using SuperLink: x\n╭─ Error ──╮\n│ [code: 23] Public key   │\n│ in use.  │\n╰────╯\n"
    assert error_message(boxed) == "[code: 23] Public key in use."
    assert (
        error_message("Using SuperLink: x\n Listing …\n\nIt is\nunavailable.")
        == "It is unavailable."
    )


def test_the_number_of_sites_is_read_from_the_apps_configuration(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "federation.toml").write_text("[data]\nagents = 4\n")
    assert sites_of(tmp_path) == 4
    (tmp_path / "federation.toml").write_text("rounds = 4\n")
    with pytest.raises(InputError, match="give --sites N"):
        sites_of(tmp_path)


def test_a_sites_data_path_contains_its_number(tmp_path):
    (tmp_path / "site3.npz").touch()
    pattern = str(tmp_path / "site{number}.npz")
    assert data_of(pattern, 3) == tmp_path / "site3.npz"
    assert data_of(None, 3) is None
    with pytest.raises(InputError, match=r"site4\.npz of site 4 does not exist"):
        data_of(pattern, 4)


@pytest.fixture
def place(tmp_path):
    make_authority(tmp_path / "keys")
    make_site_key(tmp_path / "site")
    make_site_key(tmp_path / "loose")
    (tmp_path / "loose").chmod(0o640)
    shutil.copytree(tmp_path / "keys", tmp_path / "open")
    (tmp_path / "open" / "server.key").chmod(0o604)
    for name in ("app", "full", "nothing"):
        (tmp_path / name).mkdir()
    (tmp_path / "app" / "pyproject.toml").touch()
    (tmp_path / "full" / "precious").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("keys keys", "never overwritten"),
        ("keys new --host a/b", "a bare host name or IP address"),
        ("key site", "never overwritten"),
        ("server", "give --keys FOLDER"),
        ("server --keys nothing", "has no ca.crt"),
        ("server --keys keys --host 0.0.0.0", "keep 127.0.0.1 and put a proxy in front"),
        ("server --keys keys --host fed.example.org", "or give --without-proxy"),
        ("server --keys keys --host 192.0.2.1 --without-proxy", "is not valid for 192.0.2.1"),
        ("server --insecure --host 0.0.0.0", "for 127.0.0.1 only"),
        ("server --insecure --keys keys", "omit --insecure"),
        ("register none.pub --number 0 --name W", "is not a public key of a site"),
        ("register site --number 0 --name W", "is not a public key of a site"),
        ("register site.pub --number 0 --name W --keys none", "there is no such folder"),
        ("register site.pub --number 0 --name 7", "and not a number"),
        ("rotate 0 site.pub", "no site '0' is registered; registered are none"),
        ("rotate 0", "either the new key, NEW.pub, or --finish"),
        ("rotate 0 site.pub --finish", "either the new key, NEW.pub, or --finish"),
        ("revoke Ward-3", "no site 'Ward-3' is registered"),
        ("site --number 0", "give --ca"),
        ("site --number 0 --ca keys/ca.crt", "give --key FILE"),
        ("site --number 0 --insecure --key site", "neither of them with --insecure"),
        ("site --number 0 --insecure --server fed.example.org:8000", "for 127.0.0.1 only"),
        ("site --number 0 --insecure --server fed.example.org", "must be HOST:PORT"),
        ("site --number 0 --insecure --data none", "there is no such file or folder"),
        ("site --number 0 --insecure --epsilon 0", "--epsilon 0: must be a number above 0"),
        ("site --number 0 --insecure --epsilon nan", "--epsilon nan: must be a number above 0"),
        ("site --number 0 --ca keys/ca.crt --key none", "there is no such file"),
        ("site --number 0 --ca keys/ca.crt --key loose", "(mode 0640): run chmod 600"),
        ("server --keys open", "(mode 0604): run chmod 600"),
        ("run app --insecure --out full", "exists and is not empty"),
        ("run app --insecure --resume nothing", "it has no run.json"),
        ("run app --insecure --resume nothing --out new", "exclude each other"),
        ("run nothing --insecure", "it has no pyproject.toml"),
        ("run app --insecure --server 192.0.2.1:8000", "for 127.0.0.1 only"),
        ("run app --insecure --ca keys/ca.crt", "exclude each other"),
        ("local nothing", "it has no pyproject.toml"),
        ("local app", "give --sites N"),
        ("local app --sites 2 --out full", "exists and is not empty"),
    ],
)
def test_invalid_input_is_one_sentence(nufed, place, command, words):
    before = sorted(place.rglob("*"))
    result = nufed("federate", *command.split(), cwd=place)
    assert result.returncode == 2 and words in result.stderr, result.stderr
    assert result.stderr.startswith("nufed: error: ") and result.stderr.count("\n") == 1
    assert sorted(place.rglob("*")) == before


@pytest.mark.slow
def test_the_command_line_starts_without_flower():
    code = (
        "import sys; sys.modules['flwr'] = sys.modules['cryptography'] = None; import nufed.lab.cli"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_keys_and_a_sites_key_are_made_by_commands(nufed, tmp_path):
    result = nufed("federate", "keys", "server", "--host", "10.0.0.5", cwd=tmp_path)
    assert result.returncode == 0 and "ca.crt" in result.stdout
    result = nufed("federate", "key", "ward-3", cwd=tmp_path)
    assert result.returncode == 0 and "send only ward-3.pub" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"server", "ward-3", "ward-3.pub"}


def test_without_flower_a_federation_says_what_to_install(nufed, tmp_path, monkeypatch):
    monkeypatch.setattr("nufed.lab.cli.federate.find_spec", lambda name: None)
    result = nufed("federate", "key", "site", cwd=tmp_path)
    assert result.returncode == 2 and 'pip install "nufed[flower]"' in result.stderr
    assert not list(tmp_path.iterdir())
