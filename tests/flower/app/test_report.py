"""The report of a federation: names of sites, how many answered, time and bytes of each."""

import html

from flwr.app import Context, RecordDict

from flower.app.in_memory import MemoryGrid
from flower.app.test_apps import AGENTS, TEXT, app_of
from nufed.lab.report.tables import rounds_table, sites_table
from nufed.lab.runs import load_run

NAMES = ["Ward 0", "Same", "Ward 2", "Same"]
SILENT = 1


def run_named(tmp_path, text=TEXT):
    def silent(agent, message, reply):
        last = message.content.get("about", {}).get("round") == 3
        return None if agent == SILENT and last else reply

    text = text.replace("participation = 0.75", "participation = 1.0")
    text = text.replace('["majority"]', '["majority", "untrained", "local"]')
    app = app_of(tmp_path, text)
    grid = MemoryGrid(app.site, (), tmp_path / "sites", silent)
    for number in range(AGENTS):
        grid.add(number, name=NAMES[number])
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "run")}))
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    return load_run(tmp_path / "run"), " ".join(page.split())


def test_sites_have_names_and_the_mean_says_how_many_answered(tmp_path):
    run, page = run_named(tmp_path)
    assert "mean over the 2 sites that answered, of 3 seen in training" in page
    who = f"site Same (number {SILENT})"
    assert f"gmeta, seed 0, {who}, round 3: it answered too late" in page
    assert f"gmeta, seed 0, {who}: it answered too late" in page
    assert "agent 1," not in page and run.who(0, 0) == "site Ward 0"
    assert "mean over 3 of 4 sites" in (tmp_path / "run" / "log.txt").read_text()
    for cell in ("Ward 0", "Same (number 3)"):
        assert f"{cell}</td>" in page
    assert {"majority", "untrained", "local"} <= run.baselines.keys()


def test_the_tables_add_up_the_requests(tmp_path):
    run, page = run_named(tmp_path)
    sites, rounds = sites_table(run), rounds_table(run)
    own = [line for line in run.traffic() if line.agent == SILENT]
    answered = sum(line.bytes_up > 0 for line in own)
    assert sites.rows[SILENT][:2] == [f"Same (number {SILENT})", f"{answered} of {len(own)}"]
    down = sum(line.bytes_down for line in own)
    assert sites.rows[SILENT][4] == f"{down / 1e6:.3f}"
    assert [row[0] for row in rounds.rows] == ["0", "1", "2", "3"]
    last = sum(line.bytes_down for line in own if line.round == 3)
    assert rounds.rows[3][1 + SILENT].endswith(f", {last / 1e3:.1f} ↓ 0.0 ↑")
    assert rounds.rows[3][1 + SILENT] in page and "<h2>Sites</h2>" in page


def test_a_private_run_has_no_table_of_its_sites(tmp_path):
    """Its cohorts are secret, and the report may be shared."""
    run, page = run_named(tmp_path, TEXT + "[privacy]\nclip = 1.0\nscores = true\n")
    assert run.traffic() == [] and sites_table(run) is None and rounds_table(run) is None
    assert "<h2>Sites</h2>" not in page
    assert (tmp_path / "run" / "traffic.jsonl").exists()
