"""Three hospitals train a model; the fourth adapts it to its own patients, from its raw table."""

import csv
from pathlib import Path

from write_files import write_files

import nufed

run = nufed.run("heart", ["seeds=[0]"])
print(f"\n{run.splits[0].preparation}")
write_files(run.path)
with Path(run.path / "hungary.csv").open(encoding="utf-8") as file:
    patients = list(csv.DictReader(file))
known = patients[::5]  # the file is sorted by diagnosis
new = [patient for number, patient in enumerate(patients) if number % 5]


def columns(rows):
    """Raw columns by name; a data frame would do, too."""
    return {name: [row[name] for row in rows] for name in rows[0] if name != "disease"}


bundle = nufed.load_bundle(run.path / "bundles" / "gmeta.nufed")
adapted = bundle.adapt(columns(known), [row["disease"] for row in known], steps="auto")
for name, model in (("not adapted", bundle.unadapted()), ("adapted", adapted)):
    answers = [prediction.answer for prediction in model.predict(columns(new))]
    right = sum(answer == row["disease"] for answer, row in zip(answers, new, strict=True))
    print(f"{len(new)} new patients in Budapest, {name}: {right / len(new):.1%} right")
