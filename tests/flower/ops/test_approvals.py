"""Apps that a site approves, and their digests."""

import hashlib
import random
import struct
import zipfile
from io import BytesIO

import pytest
from flwr.cli.install import install_from_fab
from typer.testing import CliRunner

from flower.ops.small_app import write_app
from nufed.errors import InputError
from nufed.flower.ops.approvals import (
    MANIFEST,
    Approvals,
    build_bundle,
    bundle_digest,
    bundled_files,
    check_names,
)
from nufed.lab.cli.commands import app as nufed


def zipped(files, compression=zipfile.ZIP_STORED):
    """A bundle of these files, which may have any names."""
    made = BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def digest_before(bundle):
    """The digest of earlier versions."""
    with zipfile.ZipFile(BytesIO(bundle)) as archive:
        listed = [
            f"{hashlib.sha256(archive.read(name)).hexdigest()} {name}\n"
            for name in sorted(archive.namelist())
            if name != MANIFEST
        ]
    return hashlib.sha256("".join(listed).encode()).hexdigest()


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
    for damaged in (b"PK", zipped({"a.py": "x = 1"}).replace(b"x = 1", b"x = 2")):
        with pytest.raises(InputError, match="not a zip file"):
            bundle_digest(damaged)
    with pytest.raises(InputError, match="compression"):  # whose unpacked size is not bounded
        bundle_digest(zipped({"a.py": "x = 1"}, zipfile.ZIP_LZMA))


EVIL = b"open('ran', 'w')\n"
EVIL_SHA = hashlib.sha256(EVIL).hexdigest()


def test_no_file_name_stands_for_another_file():
    """One approval covered both: names with line breaks looked like lines of the digest."""
    good = zipped({f"app/A.md\n{EVIL_SHA} app/__init__.py": b"text"})
    evil = zipped({"app/A.md": b"text", "app/__init__.py": EVIL})
    assert digest_before(good) == digest_before(evil)
    with pytest.raises(InputError, match="control characters"):
        bundle_digest(good)
    assert bundle_digest(evil) != digest_before(evil)


REFUSED = [
    *("a\nb.py", "a\rb.py", "a\x00.py", "a\x7f.py", "a\x85.py", "a\u2028.py", "\x1b[2J.py"),
    *("/a.py", "//a.py", "../a.py", "a/../b.py", "..", "./a.py", "a/./b.py", "a//b.py", "a/", ""),
    *("a\\b.py", "C:a.py", "C:/a.py", "a.py:stream", "a?.py", "a*.py", 'a".py', "a|b", "<a>"),
    *("con", "app/NUL.py", "aux.tar.gz", "Com1", "lpt9.md", "com¹.py", "nul .py"),
    *("a.py.", "a.py ", " a.py", "app /a.py", "app./a.py", "\u00a0a.py"),
    *(
        ".info/x",
        ".INFO/CONTENT",
        ".info/content",
        ".info",
        ".in\u200bfo/CONTENT",
        ".info/a/CONTENT",
    ),
]


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_a_system_may_take_for_another_is_refused(name):
    with pytest.raises(InputError, match="another name") as error:
        check_names(["app.py", name])
    assert str(error.value).isascii() and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("app.py", "App.PY"),
        ("caf\u00e9.py", "cafe\u0301.py"),
        ("fi.py", "\ufb01.py"),
        ("ss.py", "\u00df.py"),
        ("app.py", "ap\u200bp.py"),
        ("app", "app/a.py"),
        ("App", "app/b/a.py"),
    ],
)
def test_two_names_that_a_system_may_take_for_one_are_refused(one, other):
    for names in ([one, other], [other, one]):
        with pytest.raises(InputError, match="another name"):
            check_names(names)


def test_a_second_name_in_an_extra_field_is_refused():
    """Newer versions of Python unpack the file under it."""
    info = zipfile.ZipInfo("app.md")
    other = b"app.py"
    crc = struct.pack("<BL", 1, zipfile.crc32(b"app.md"))
    info.extra = struct.pack("<HH", 0x7075, len(crc + other)) + crc + other
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(info, "x")
    try:
        found = list(bundled_files(made.getvalue()))
    except InputError as error:
        assert "two names" in str(error)
    else:
        with zipfile.ZipFile(made) as archive:
            assert archive.namelist() == found == ["app.md"]  # Python ignores it


def test_common_names_are_taken(tmp_path):
    check_names(["app.py", "a b/c-d_e.py", "日本.md", ".env", "a..b.py", "console.py", MANIFEST])


@pytest.mark.parametrize("times", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_what_is_unpacked_is_what_has_the_digest(tmp_path, times):
    """Bundles with names of hostile pieces are refused, or unpack to the files of the digest."""
    rng, digests = random.Random(times), {}
    pieces = ["a", "B", "b", "/", ".", "..", "\n", " ", "\\", "é", "\u200b", ".py", "con"]
    pieces.append(EVIL_SHA)
    project = build_bundle(write_app(tmp_path / "app", sites=2, rounds=2))
    fixed = {k: v for k, v in bundled_files(project).items() if k == "pyproject.toml"}
    taken = 0
    for number in range(times):
        names = {
            "".join(rng.choices(pieces, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))
        }
        files = fixed | {name: rng.choice([b"", b"x", EVIL]) for name in names}
        listed = [f"{n},{hashlib.sha256(c).hexdigest()},0" for n, c in fixed.items()]
        bundle = zipped(files | {MANIFEST: "\n".join(listed)})
        try:
            digest = bundle_digest(bundle)
        except InputError:
            continue
        taken += 1
        assert digests.setdefault(digest, files) == files
        place = install_from_fab(bundle, tmp_path / str(number), skip_prompt=True)
        paths = [path for path in place.rglob("*") if path.is_file()]
        assert {path.relative_to(place).as_posix(): path.read_bytes() for path in paths} == files
    assert times / 20 < taken < times


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


BOUNDED = """
[methods.gmeta]
[methods.scaffold]
local_steps = 3
[approval]
rounds = [1, 200]
local_steps = [1, 50]
meta_lr = [0, 1]
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("rounds = 2", "rounds = 200", ""),
        ("local_steps = 3", "local_steps = 50\nmeta_lr = 0.5", ""),
        ("local_steps = 2", "local_steps = 1", ""),
        ("[methods.scaffold]\nlocal_steps = 3", "", ""),
        ("rounds = 2", "rounds = 201", "rounds = 201 is outside of the approved 1 … 200)"),
        (
            "meta_lr = 0.3",
            "meta_lr = 1.1",
            "method.meta_lr = 1.1 is outside of the approved 0 … 1)",
        ),
        ("meta_lr = 0.3", "meta_lr = nan", "method.meta_lr = nan is outside of"),
        ("local_steps = 3", "local_steps = true", "methods.scaffold.local_steps = True is outside"),
        ("adapt_lr = 0.2", "adapt_lr = 0.3", "method.adapt_lr = 0.3 is not what was approved)"),
        ("rounds = [1, 200]", "rounds = [1, 300]", "approval.rounds = [1, 300] is not what was"),
        ("[methods.gmeta]", "[methods.ditto]\n[methods.gmeta]", "methods.ditto = {} is not what"),
        ("[methods.gmeta]\n[methods.scaffold]\nlocal_steps = 3", "[methods]", "methods.gmeta = N"),
        ("[approval]", "local_steps = 1 # twice\n[approval]", None),
        ("hidden = [6]", "hidden = [6.0]", "model.args.hidden = [6.0] is not what was approved"),
        ("test = 0.25", "test = 0.25\n'x.rounds' = 1", "data.x.rounds = 1 is not"),
    ],
    ids=str,
)
def test_an_approval_covers_settings_within_its_bounds(tmp_path, old, new, sentence):
    app, approvals = write_app(tmp_path / "app", sites=2, rounds=2), Approvals(tmp_path / "state")
    config = app / "federation.toml"
    config.write_text(config.read_text() + BOUNDED)
    approvals.add(build_bundle(app))
    assert approvals.refusal(build_bundle(app)) == ""
    assert config.read_text().count(old) == 1
    config.write_text(config.read_text().replace(old, new))
    refusal = approvals.refusal(build_bundle(app))
    if sentence == "":
        assert refusal == ""
    else:
        assert refusal.startswith("has not approved this app (digest ")
        assert (f"; {sentence}" if sentence else "): review it, then run") in refusal
    (app / "app.py").write_text((app / "app.py").read_text() + "import os\n")
    assert "): review it" in approvals.refusal(build_bundle(app)), "the code is another one"


def test_without_bounds_an_approval_covers_nothing_else(tmp_path):
    app, approvals = write_app(tmp_path / "app", sites=2, rounds=2), Approvals(tmp_path / "state")
    approvals.add(build_bundle(app))
    config = app / "federation.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    assert "has not approved this app" in approvals.refusal(build_bundle(app))
    config.write_text(config.read_text() + "[approval]\nrounds = [1, 9]\n")
    assert "has not approved this app" in approvals.refusal(build_bundle(app))


def test_the_diff_hides_no_change(tmp_path):
    approvals = Approvals(tmp_path)
    first = {
        "app.py": b"x = 1\ny = 2\n",
        "end.py": b"a = 1\n",
        "feed.py": b"# a\nb = 1\n",
        "model.bin": b"\x00\x01\n",
        "odd.md": b"\xff\n",
    }
    approvals.add(zipped(first))
    assert approvals.diff(zipped(first)) == []
    changes = {
        "app.py": b"x = 1\ry = 2\n",
        "end.py": b"a = 1",
        "feed.py": b"# a\x0cb = 1\n",
        "model.bin": b"\x00\x02\n",
        "odd.md": b"\\xff\n",
        "empty/__init__.py": b"",
        "\u0430pp.py": b"pass\n",
        "forged.md": b"++ app.py\nfile app.py: removed\n",
        "latin.py": b"# coding: utf-7\n#+AAo-evil\n",
    }
    for name, content in changes.items():
        lines = approvals.diff(zipped(first | {name: content}))
        about = [line for line in lines if line.startswith("file ")]
        shown = name.replace("\u0430", "\\u0430")
        assert len(about) == 1 and about[0].startswith(f"file {shown}: ")
        assert hashlib.sha256(content).hexdigest() in about[0]
    said = {name: approvals.diff(zipped(first | {name: text})) for name, text in changes.items()}
    assert "control or invisible characters in line 1" in said["app.py"][0]
    assert "+x = 1\ry = 2" in said["app.py"] and "+# a\x0cb = 1" in said["feed.py"]
    assert "not text" in said["model.bin"][0] and len(said["model.bin"]) == 1
    assert "+++ \\u0430pp.py" in said["\u0430pp.py"]
    assert "Python reads it as utf-7" in said["latin.py"][0]
    removed = approvals.diff(zipped({"app.py": first["app.py"]}))
    assert "file model.bin: removed" in removed


def test_an_approval_by_an_earlier_version_does_not_count(tmp_path):
    app, state = write_app(tmp_path / "app", sites=2, rounds=2), tmp_path / "state"
    approvals, bundle = Approvals.of_site(state), build_bundle(app)
    assert approvals.outdated() == ""
    approvals.folder.mkdir(parents=True)
    hostile = zipped({f"a.md\n{EVIL_SHA} app.py": b"x"})
    for number, old in enumerate((bundle, hostile), 1):
        (approvals.folder / f"{number:06d}-{digest_before(old)}.fab").write_bytes(old)
    assert approvals.last() is None and approvals.outdated().endswith("approve again")
    command = ["federate", "approve", str(app), "--folder", str(state), "--yes"]
    again = CliRunner().invoke(nufed, command)
    assert again.exit_code == 0 and "file app.py: added, " in again.output
    assert approvals.last().name == f"000003-{bundle_digest(bundle)}.fab"
    assert approvals.has(bundle_digest(bundle)) and approvals.diff(bundle) == []
