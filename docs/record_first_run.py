"""Records the first run, of which README shows the picture and some numbers.

    nufed run omniglot --out RUN
    python docs/record_first_run.py RUN

It writes docs/first-run.svg and docs/results/first-run.json, the one source of these numbers: a
test compares README with it, and it with the preset.
"""

import hashlib
import json
import shutil
import sys
import tomllib
from pathlib import Path

from nufed import load_run
from nufed.lab.analysis.comparison import gain_of_steps

DOCS = Path(__file__).parent
PRESET = DOCS.parent / "src/nufed/lab/config/presets/omniglot.toml"
RECORD = DOCS / "results/first-run.json"


def digest_of_preset() -> str:
    """That of what the preset sets, its note aside."""
    tables = tomllib.loads(PRESET.read_text("utf-8")) | {"note": ""}
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def record(path: Path) -> dict[str, object]:
    """Scores of newcomers after fine-tuning, and what the larger ν gains and costs, in points."""
    run = load_run(path)
    gain = gain_of_steps(run)
    assert gain is not None and gain.group == "unseen"
    return {
        "preset": digest_of_preset(),
        "personal": {r.name: points(r.personal.mean) for r in run.rows() if r.group == "unseen"},
        "per_round": [points(gain.per_round.mean), points(gain.per_round.half_width)],
        "work": round(gain.work, 3),
        "per_gradient": [points(gain.per_gradient.mean), points(gain.per_gradient.half_width)],
    }


def points(share: float | None) -> float:
    assert share is not None
    return round(100 * share, 2)


if __name__ == "__main__":
    run = Path(sys.argv[1])
    RECORD.write_text(json.dumps(record(run), indent=1) + "\n", "utf-8")
    shutil.copyfile(run / "figures/guesses.svg", DOCS / "first-run.svg")
