"""Writes cleveland.csv, hungary.csv, long-beach.csv and switzerland.csv: each hospital's own table.

    python write_files.py [FOLDER]

They stand for what four hospitals would have: raw columns, empty cells, columns without any value.
"""

import csv
import sys
from importlib.resources import files
from pathlib import Path

HOSPITALS = ("cleveland", "hungary", "long-beach", "switzerland")


def write_files(folder):
    text = (files("nufed.data") / "heart.csv").read_text("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    for hospital in HOSPITALS:
        own = [row.copy() for row in rows if row["hospital"] == hospital]
        for row in own:
            del row["hospital"]
            row["disease"] = "healthy" if row.pop("num") == "0" else "disease"
            for name in ("trestbps", "chol"):  # no living patient has 0
                row[name] = "" if row[name] == "0" else row[name]
        with (Path(folder) / f"{hospital}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, own[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(own)


if __name__ == "__main__":
    write_files(sys.argv[1] if len(sys.argv) > 1 else ".")
