"""Sites and servers with other versions of nufed, and runs that are resumed with another one."""

import pytest

from flower.app.in_memory import agents_data, federate, plan_of
from flower.app.test_apps import AGENTS, COHORT, app_of, start, trains
from flower.ops.small_app import files_of
from nufed.algorithms import fedavg
from nufed.errors import TrainingError
from nufed.flower.app import payload, roster, site_app
from nufed.flower.app.payload import PayloadError, content, read_identity
from nufed.lab.config import Config
from nufed.lab.files import read_sealed, sha256
from nufed.lab.runs import provenance
from support import Killed

DATA = agents_data(AGENTS)


@pytest.fixture
def installed(monkeypatch):
    """Sets the versions of the server and of the sites."""

    def install(server, sites):
        for module, version in ((roster, server), (payload, server), (site_app, sites)):
            monkeypatch.setattr(module, "VERSION", version)

    return install


def test_releases_of_one_minor_series_train_together(installed, caplog):
    plan = plan_of(fedavg(meta_lr=0.1, batch_size=5), rounds=1)
    (_, right), _, _ = federate(plan, DATA)
    for versions in (("0.1.0", "0.1.3"), ("0.1.10", "0.1.9")):
        installed(*versions)
        (_, done), _, _ = federate(plan, DATA)
        assert done.server["model"].equal(right.server["model"]) and not done.dropped
    assert "nufed" not in caplog.text


@pytest.mark.parametrize(
    ("server", "sites"),
    [("0.1.0", "0.2.0"), ("1.1.0", "0.1.0"), ("0.1.0", "0.1.0rc1"), ("0.1.0.dev0", "0.1.0.dev1")],
)
def test_others_are_refused_and_both_logs_name_both_versions(installed, server, sites, caplog):
    installed(server, sites)
    with pytest.raises(TrainingError, match="correct that at the excluded sites"):
        federate(plan_of(fedavg(meta_lr=0.1, batch_size=5)), DATA)
    advice = "install releases of one minor series at both"
    assert f"excluded: it has nufed '{sites}' and the server '{server}': {advice}" in caplog.text
    assert f"this site has nufed {sites} and the server {server}: {advice}" in caplog.text


def test_versions_are_compared_before_fields_that_may_differ_between_them(installed):
    installed("0.1.0", "0.2.0")
    with pytest.raises(PayloadError, match=r"it has nufed '0\.2\.0' and the server '0\.1\.0'"):
        read_identity(content(number=1, version="0.2.0"), AGENTS)
    with pytest.raises(PayloadError, match="it reports nufed 3, which is not a version"):
        read_identity(content(version=3), AGENTS)


@pytest.mark.usefixtures("no_report")
def test_a_run_begun_under_one_patch_version_resumes_under_the_next(
    installed, tmp_path, monkeypatch
):
    """Also if the next one has more configuration keys, which change configurations' digests."""
    app = app_of(tmp_path)
    whole = start(app, tmp_path, tmp_path / "whole")
    versions = {"nufed": "0.1.0", "torch": "2", "numpy": "2"}
    monkeypatch.setattr(provenance, "version", lambda package: versions[package])
    installed("0.1.0", "0.1.0")

    def kill(agent, message, reply):
        if message.content["about"].get("round") == 3:
            raise Killed
        return reply

    with pytest.raises(Killed):
        start(app, tmp_path, tmp_path / "run", kill)
    versions["nufed"] = "0.1.1"
    installed("0.1.1", "0.1.0")  # the server is upgraded first
    monkeypatch.setattr(Config, "fingerprint", property(lambda config: sha256(b"more keys")))
    rest = start(app, tmp_path, tmp_path / "run")
    assert trains(rest.requested) == trains(whole.requested) - 2 * COHORT
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")
    about = read_sealed(tmp_path / "run" / "run.json").about
    assert (about["software"]["nufed"], about["resumed"]) == ("0.1.0", [versions])
    assert "other software (nufed 0.1.0, now 0.1.1)" in (tmp_path / "run" / "log.txt").read_text()
