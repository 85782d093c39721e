"""Apps that a site approves, and their digests."""

import zipfile
from io import BytesIO

import pytest
from typer.testing import CliRunner

from flower.ops.small_app import write_app
from nufed.cli.commands import app as nufed
from nufed.errors import InputError
from nufed.flower.ops.app_bundle import build_bundle, bundle_digest, bundled_files
from nufed.flower.ops.approvals import Approvals


def test_a_digest_depends_on_paths_and_contents_only(tmp_path):
    app = write_app(tmp_path / "app", sites=2, rounds=2)
    bundle = build_bundle(app)
    again = BytesIO()
    with zipfile.ZipFile(again, "w", zipfile.ZIP_STORED) as archive:  # another compression
        for name, content in reversed(bundled_files(bundle).items()):
            archive.writestr(name, content)
    assert bundle != again.getvalue() and bundle_digest(bundle) == bundle_digest(again.getvalue())
    (app / "app.py").write_text((app / "app.py").read_text() + "\n")
    assert bundle_digest(build_bundle(app)) != bundle_digest(bundle)
    (app / "app.py").rename(app / "main.py")
    assert len({bundle_digest(each) for each in (bundle, build_bundle(app))}) == 2


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_bundle_that_could_be_unpacked_to_other_files_is_refused():
    twice = BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        for text in ("good", "bad"):
            archive.writestr("app.py", text)
    with pytest.raises(InputError, match="two files of the same name"):
        bundle_digest(twice.getvalue())
    with pytest.raises(InputError, match="not a zip file"):
        bundle_digest(b"PK")


def test_an_app_is_approved_after_its_diff_to_the_last_approved_one(tmp_path):
    app, state = write_app(tmp_path / "app", sites=2, rounds=2), tmp_path / "state"
    command = ["federate", "approve", str(app), "--folder", str(state)]
    refused = CliRunner().invoke(nufed, command, input="n\n")
    assert refused.exit_code == 1 and "+++ app.py" in refused.output
    assert Approvals.of_site(state).last() is None
    assert CliRunner().invoke(nufed, command, input="y\n").exit_code == 0
    digest = bundle_digest(build_bundle(app))
    assert Approvals.of_site(state).has(digest)
    (app / "app.py").write_text((app / "app.py").read_text() + "import os\n")
    changed = CliRunner().invoke(nufed, [*command, "--yes"])
    lines = changed.output.splitlines()
    assert [line for line in lines if line.startswith("+")] == ["+++ app.py", "+import os"]
    assert lines[-1] == f"approved: {bundle_digest(build_bundle(app))}"
    assert Approvals.of_site(state).has(digest)  # a run that began with it can be resumed
    same = CliRunner().invoke(nufed, [*command, "--yes"])
    assert same.output.splitlines() == lines[-1:]
    assert len(list((state / "approved").iterdir())) == 2
