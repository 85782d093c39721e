"""The app that docs/deployment.md shows does what the page says."""

import re
from pathlib import Path

import numpy as np
from flwr.app import Context, RecordDict

from flower.in_memory import MemoryGrid

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"


def test_the_app_of_the_page_trains_and_prints_every_sites_scores(tmp_path, capsys):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 64)).astype(np.float32)
    np.savez(tmp_path / "my_data.npz", inputs=inputs, classes=rng.integers(10, size=60))
    text = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    app = {}
    exec(text.replace("/srv", str(tmp_path)), app)
    grid = MemoryGrid(app["site"], range(2))
    app["server"](grid, Context(1, 0, {}, RecordDict(), {}))
    lines = capsys.readouterr().out.splitlines()
    assert [re.fullmatch(r"(\d) [\d.]+ -> [\d.]+", line)[1] for line in lines] == ["0", "1"]
