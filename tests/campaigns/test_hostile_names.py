"""Names made to break output: classes, owners, methods, directories, headers, cards, messages.

Every command ends as it should, prints nothing but text, and shows what a name holds.
"""

import csv
import io
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vl_convert
from torch import nn

import nufed as library
from nufed import Bundle, InputError, Samples
from nufed.errors import visible
from nufed.lab.cli.bundle_commands import _write
from nufed.lab.cli.terminal import console, styled, table
from nufed.lab.config import load_config
from nufed.lab.readers.files import from_cell, read_data, to_cell
from nufed.lab.readers.sources import SOURCES
from nufed.lab.report.charts import counts_chart
from nufed.lab.report.figures import spec_of

KNOWN = [
    *("[/b]yes", "[b]", "[red]x[/]", "[link=http://x]y[/link]", ":smile:", "[", "\\[b]", "[/]"),
    *("\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "a\rb", "a\nb", "a\tb", "\x00", "\x7f", "\x85"),
    *("\u202eevil", "\u2066x\u2069", "\u200bx", "a\u2028b", "a\u2029b", "\ufeff", "\ufffe"),
    *("constructor", "toString", "__proto__", "hasOwnProperty", "valueOf", "length", "null"),
    *("=1+1", "+x", "-x", "@x", "'=x", "\t=x", "-0.5", "'", '"', "a,b", "a;b", ""),
    *("<script>alert(1)</script>", "</script>", "&amp;", "{{7*7}}", "${x}", "`x`", "|", "# x"),
    *("[a](http://x)", "*a*", "\\", "\\x1b", "%s", "{0}", "é", "日本", "x" * 300, "datum['x']"),
]
METHODS = ["constructor", "toString", "__proto__", "hasOwnProperty", "__init__", "null", "0"]
ALPHABET = [*"[]/\\=+-@'\"<>&|`*_#{}$%;:,. ab\x00\x07\x1b\r\n\t\x85\x9b\u200b\u202e\u2028\u2066"]


def hostile(rng):
    """A name from the list, random characters, or both."""
    signs = "".join(rng.choices(ALPHABET, k=rng.randint(1, 8)))
    return rng.choice([rng.choice(KNOWN), signs, rng.choice(KNOWN) + signs])


def names_of(rng, number):
    """So many different names."""
    found = []
    while len(found) < number:
        name = hostile(rng)
        if visible(name) not in map(visible, found):
            found.append(name)
    return found


def check_text(printed):
    """It contains no control characters."""
    assert all(sign.isprintable() or sign == "\n" for sign in printed), repr(printed)


def check_printed(name):
    file = io.StringIO()
    terminal = console()
    terminal.file, terminal.width = file, 2000
    terminal.print(styled(name))
    terminal.print(table([[name, "x"]], [name, "y"]))
    printed = file.getvalue()
    check_text(printed)
    lines = printed.splitlines()
    assert len(lines) == 3 and all(visible(name).strip() in line for line in lines)


def check_cell(name, folder):
    """It is not written as a formula, and is read back as a label."""
    said = SimpleNamespace(answer=name, probability=0.5)
    _write(folder / "answers.csv", [said])
    with (folder / "answers.csv").open(encoding="utf-8", newline="") as file:
        ((_, cell, _),) = list(csv.reader(file))[1:]
    assert cell == to_cell(name) and from_cell(cell).strip() == name.strip()
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r")) or float(cell)


def check_header(name, folder, nufed):
    """A file whose header and label are such names is used, or refused in one line of text."""
    with (folder / "odd.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([[name, "label"], ["1", to_cell(name)], ["x" + name, "y"]])
    said = nufed("adapt", "b.nufed", "odd.csv", "--out", "no.safetensors", cwd=folder)
    assert said.returncode == 2 and len(said.stderr.splitlines()) == 1
    check_text(said.stderr)


def check_card(names, folder, nufed):
    """A bundle of such names is shown, adapted and used."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(2, len(names)))
    settings = {"input_shape": [2], "outputs": len(names)}
    bundle = Bundle.of(
        module,
        build="logistic",
        args=settings,
        input_shape=(2,),
        adapt_lr=0.1,
        classes=tuple(names),
        name=names[0],
        trained={name: name for name in names},
    )
    bundle.save(folder / "b.nufed")
    targets = np.arange(4 * len(names)) % len(names)
    np.savez(
        folder / "mine.npz",
        inputs=np.random.default_rng(0).random((len(targets), 2)),
        targets=targets,
    )
    for call in (
        ("inspect", "b.nufed"),
        ("adapt", "b.nufed", "mine.npz", "--out", "mine.safetensors", "--force", "--anyway"),
        ("predict", "mine.safetensors", "mine.npz", "--out", "answers.csv", "--force"),
    ):
        said = nufed(*call, cwd=folder)
        assert said.returncode == 0, (names, said.stderr)
        check_text(said.stdout + said.stderr)


def check_chart(names):
    """Classes and agents of such names are drawn, each with its own row and column."""
    chart = counts_chart(names, names, [[1] * len(names)] * len(names))
    svg = vl_convert.vegalite_to_svg(spec_of(chart))
    assert svg.count('aria-roledescription="rect mark"') == len(names) ** 2
    vl_convert.svg_to_png(svg)


@pytest.mark.parametrize("times", [len(KNOWN), pytest.param(2000, marks=pytest.mark.slow)])
def test_any_name_is_shown_as_text(tmp_path, nufed, tell, times):
    rng = random.Random(times)
    names = [*KNOWN, *(hostile(rng) for _ in range(times - len(KNOWN)))]
    for name in names:
        check_printed(name)
        check_cell(name, tmp_path)
    groups = max(3, times // 20)
    for _ in range(groups):
        few = names_of(rng, 5)
        check_chart(few)
        check_card(few, tmp_path, nufed)
        check_header(few[0], tmp_path, nufed)
    for name in (*METHODS, *KNOWN):
        if name in METHODS or name.startswith("a"):
            check_chart([name, "b"])
    tell(
        f"hostile names: {times:,} printed and written as CSV cells, {groups} times five drawn, "
        "bundled, inspected, adapted and predicted: nothing but text, no other exception"
    )


def source(classes, owners):
    """A data set with these names."""
    draws = np.random.default_rng(0)
    return Samples(
        torch.from_numpy(draws.normal(size=(90, 3))).float(),
        torch.from_numpy(draws.integers(0, len(classes), 90)),
        tuple(classes),
        np.array(owners, dtype=object)[np.arange(90) % len(owners)],
    )


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_run_with_hostile_names_completes(tmp_path, nufed, tell, times, monkeypatch):
    monkeypatch.setitem(SOURCES, "hostile", source)
    rng = random.Random(times)
    for number in range(times):
        methods = rng.sample(METHODS, 2)
        args = {"classes": names_of(rng, 4), "owners": names_of(rng, 3)}
        config = {
            "rounds": 1,
            "workers": 1,
            "data": {"source": "hostile", "args": args},
            "model": {"name": "logistic"},
            "method": {"algorithm": "gmeta", "batch_size": 4},
            "methods": {name: {} for name in methods},
        }
        (tmp_path / "c.toml").write_text(load_config(config).to_toml(), "utf-8")
        signs = "".join(rng.choices([s for s in ALPHABET if s not in "\x00/"], k=6))
        out = tmp_path / f"{number}-[b]{signs}"
        for call in (
            ("run", "c.toml", "--out", out),
            ("run", "--resume", out),
            ("bundle", out, "--method", methods[0], "--out", tmp_path / f"{number}.nufed"),
            ("inspect", tmp_path / f"{number}.nufed"),
            ("advise", out, "--max-steps", "1"),
        ):
            said = nufed(*call, cwd=tmp_path)
            assert said.returncode == 0, (call, args, said.stderr)
            check_text(said.stdout + said.stderr)
        page = (out / "report.html").read_text("utf-8")
        body = page[page.index("<body>") :]
        check_text(body)
    tell(f"hostile names: {times} runs with such classes, owners, methods and directories complete")


def test_commands_print_through_one_module():
    """Other prints are of JSON, which Python writes in ASCII."""
    root = Path(library.__file__).parent
    direct = re.compile(
        r"^(?!\s*(>>>|\.\.\.)).*?((?<![\w.])print\((?!json\.dumps)|\bConsole\()", re.M
    )
    found = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if direct.search(path.read_text("utf-8"))
    ]
    assert found == ["lab/cli/terminal.py"]


@pytest.mark.parametrize("name", ["local", "majority", "untrained"])
def test_a_method_can_not_have_the_name_of_a_baseline(name):
    with pytest.raises(InputError, match=f"methods.{name}: {name} is the name of a null baseline"):
        load_config({"methods": {name: {}}})


@pytest.mark.parametrize("name", ["\ud800", "x" * 1001, 3])
def test_names_that_files_can_not_hold_are_refused_before_training(name):
    with pytest.raises(InputError, match="can't be used: give text of at most 1000 bytes"):
        Samples(torch.zeros(2, 1), torch.tensor([0, 1]), classes=("a", name))


def test_what_is_asked_for_by_hand_still_works(tmp_path):
    """A label is the same class after a spreadsheet has saved it."""
    (tmp_path / "a.csv").write_text("x,label\n1,'=a\n2,-1\n3,'tis\n")
    assert read_data(tmp_path / "a.csv").labels == ["=a", "-1", "'tis"]
