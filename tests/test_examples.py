import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_own_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = runpy.run_path(str(EXAMPLES / "own_model.py"))["run"]
    accuracy, error = (
        float(line.split(": ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()
    )
    assert accuracy > 0.6
    rows = {row.name: row.after.mean for row in run.rows()}
    assert abs(error - rows["gmeta"]) < 1e-3
    assert rows["gmeta"] < rows["local"] < rows["untrained"]
    for name in ("own-classification", "own-regression"):
        assert (tmp_path / "runs" / f"{name}-001" / "report.html").exists()
