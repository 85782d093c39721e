"""Writes src/nufed/data/heart.csv from the files of UCI Heart Disease: tools/make_heart.py DIR.

DIR holds processed.cleveland.data and so on, as https://archive.ics.uci.edu/dataset/45 has them;
their digests are checked. Values are unchanged: only names of hospitals and columns are added, "?"
becomes an empty cell, and 63.0 and .7 are written as 63 and 0.7.
"""

import csv
import hashlib
import sys
from pathlib import Path

OUT = Path(__file__).parents[1] / "src/nufed/data/heart.csv"
FILES = {
    "cleveland": ("cleveland", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    "hungary": ("hungarian", "31134d83efc3266e486acece5e259585d7a52f16afa5567f195e70a993327afe"),
    "switzerland": (
        "switzerland",
        "422aa0182e5b95ff4ef2d95512caf3335e114fc1816db477a5a30286b267c2d7",
    ),
    "long-beach": ("va", "1a12cdc1aa204bc5506aa22f04b6c45224b23f36adbd1c62039f65f370e334ea"),
}
COLUMNS = [
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal", "num"),
]


def main(folder: Path) -> None:
    with OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["hospital", *COLUMNS])
        for hospital, (name, digest) in FILES.items():
            path = folder / f"processed.{name}.data"
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                sys.exit(f"{path} is not the file that this was made from: its SHA-256 differs")
            for line in content.decode("ascii").split():
                cells = ["" if cell == "?" else f"{float(cell):.10g}" for cell in line.split(",")]
                assert len(cells) == len(COLUMNS), line
                writer.writerow([hospital, *cells])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
