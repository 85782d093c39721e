import csv
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import nufed
from nufed.lab.config import load_config
from nufed.lab.config.problem import build_samples, build_split
from support import without_report

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# in a process of its own: nbclient leaves sockets open
EXECUTE = """
import nbclient, nbformat
notebook = nbformat.read({!r}, 4)
nbclient.execute(notebook, cwd=".", timeout=None)
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.mark.usefixtures("figures")
def test_the_tutorial_and_what_its_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "tutorial.py"))
    line = r"^(\d+) samples: not adapted ([\d.]+)%, 3 steps.* ([\d.]+)%, steps=auto ([\d.]+)%$"
    printed = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    shares = {int(n): [float(share) for share in row] for n, *row in printed}
    assert shares[20][0] < shares[20][1] - 5 and shares[200][2] > shares[200][1] + 1
    page = (ROOT / "docs/tutorial.md").read_text("utf-8")
    cells = re.findall(r"^\| (\d+) \| (\d+) % \| (\d+) % \| (\d+) % \|$", page, re.MULTILINE)
    assert {int(n): [int(share) for share in row] for n, *row in cells} == {
        n: [round(share) for share in row] for n, row in shares.items()
    }
    assert (tmp_path / "runs/tutorial-001/figures/tutorial.svg").exists()


def test_my_digits_are_those_of_an_agent_that_the_quickstart_never_trains_on():
    config = load_config("quickstart")
    samples = build_samples(config.data)
    split = build_split(config.data, samples, config.seeds[0])
    agent = split.unseen[0]
    known = [*split.train[agent], *split.validation[agent]]
    for name, rows in (("my_digits", known), ("my_digits_new", split.test[agent])):
        with (EXAMPLES / f"{name}.csv").open() as file:
            lines = list(csv.reader(file))[1:]
        wanted = [[*samples.inputs[r].flatten().tolist(), int(samples.targets[r])] for r in rows]
        assert [[int(x) for x in line] for line in lines] == wanted


def test_the_core_needs_neither_lab_nor_flower(tmp_path):
    code = f"""
import runpy, sys
runpy.run_path({str(EXAMPLES / "core.py")!r})
print(sorted(name for name in sys.modules if name.startswith(("nufed.lab", "nufed.flower"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    fedavg, gmeta, imported = done.stdout.splitlines()
    assert imported == "[]" and not list(tmp_path.iterdir())
    for line in (fedavg, gmeta):
        shared, personal = (float(share) for share in re.findall(r"([\d.]+)%", line))
        assert 70 < shared < personal


def test_own_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = runpy.run_path(str(EXAMPLES / "own_model.py"))["run"]
    accuracy, error = (
        float(line.split(": ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()
    )
    assert accuracy > 0.6
    rows = {row.name: row.personal.mean for row in run.rows()}
    assert abs(error - rows["gmeta"]) < 1e-3
    assert rows["gmeta"] < rows["local"] < rows["untrained"]
    for name in ("own-classification", "own-regression"):
        assert (tmp_path / "runs" / f"{name}-001" / "report.html").exists()


def test_shakespeare(tmp_path, monkeypatch, capsys):
    """On a stand-in, for fewer rounds: five roles, each of which repeats a line of its own."""
    lines = [
        "to be or not to be",
        "that is the question",
        "so may I",
        "Nay, answer me",
        "Long live",
    ]
    said = [
        f"{role}:\n" + "\n".join([line] * 240) for role, line in zip("ABCDE", lines, strict=True)
    ]
    (tmp_path / "play.txt").write_text("\n\n".join(said))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shakespeare.py", "play.txt"])
    run = nufed.run
    monkeypatch.setattr(nufed, "run", lambda config, **given: run(config | {"rounds": 15}, **given))
    with without_report():
        runpy.run_path(str(EXAMPLES / "shakespeare.py"))
    printed = capsys.readouterr().out
    line = r"^(\w+) +(\w+) +([\d.]+) bits per character$"
    bits = {(m, group): float(x) for m, group, x in re.findall(line, printed, re.MULTILINE)}
    assert len(bits) == 4 and all(0 < each < 3 for each in bits.values())  # 4.3 by chance
    assert "B: that is the question\nthat is the question" in printed


def test_the_notebook(tmp_path):
    """Every cell runs, and shows what a person is to see: without fetching anything."""
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    script = EXECUTE.format(str(EXAMPLES / "notebook.ipynb"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(tmp_path / "executed.ipynb", 4)
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", ())
    ]
    bar, table, chart, frame, history, page = shown
    assert '<progress value="20" max="20">' in bar and "runs/notebook-001" in bar
    assert table.count("<table>") == 2 and re.search(r"<td>gmeta</td><td>[\d.]+ %</td>", table)
    for framed in (chart, page):
        assert framed.startswith('<div><iframe sandbox="allow-scripts"')
        assert not re.search(r'(src|href)=(&quot;|")https?:', framed)
    assert "vegaEmbed(&quot;#chart&quot;, {" in chart and "communication round" in chart
    assert "fedavg" in frame and "bytes_up" in history and "All results" in page
    values = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [v for v in values if v["output_type"] in ("stream", "error")] == []
