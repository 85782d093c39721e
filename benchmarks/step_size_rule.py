"""The rule that chooses the step size of fine-tuning at use, beside two others, on four problems.

For every problem, method and seed one model is trained and scored after the shown number of steps
with the step size as trained, with that of the rule of nufed.evaluate.step_size, and with the
argmax of the validation score over powers of 3, which was the rule before. Prints paired
differences over agents and seeds with Holm's correction, and writes docs/results/step-size.json
and the table in docs/report.md.

    python benchmarks/step_size_rule.py --data DIR    # DIR has heart/, and CIFAR-10 as archives

Finished runs are reused and interrupted ones resumed; to repeat one, remove its directory under
runs/step-size. A few minutes.
"""

import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
from scipy import stats

import nufed
from nufed.evaluate import Scoring, choose_step_sizes, preferred
from nufed.lab.config import load_config
from nufed.lab.config.problem import Given, Problem
from nufed.lab.runs.json_files import finite
from nufed.lab.runs.part_files import read_received
from nufed.simulation import BatchedEngine

RUNS, RESULTS = Path("runs/step-size"), Path("docs/results/step-size.json")
PAGE, BEGIN, END = Path("docs/report.md"), "<!-- step sizes -->", "<!-- end -->"
SEEDS = list(range(5))
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART = {
    "name": "heart",
    "rounds": 60,
    "metric": "balanced_accuracy",
    "eval_every": 60,
    "data": {"validation": 0.1, "test": 0.4},  # 30, 29, 12 and 20 validation samples
    "model": {"name": "fcnn", "args": {"hidden": [16], "activation": "tanh"}},
    "method": {
        "adapt_steps": 3,
        "adapt_lr": 0.05,
        "meta_lr": 0.1,
        "local_steps": 4,
        "batch_size": 20,
    },
    "methods": {
        "fedavg": {},
        "per-fedavg": {"algorithm": "per_fedavg"},
        "gmeta": {"algorithm": "gmeta"},
    },
}


def heart(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, standardised, with indicators of missing values; disease or not; the hospital."""
    tables = [
        np.genfromtxt(folder / f"processed.{name}.data", delimiter=",", missing_values="?")
        for name in HOSPITALS
    ]
    owners = np.repeat(HOSPITALS, [len(table) for table in tables])
    table = np.concatenate(tables)
    columns, disease = table[:, :-1], (table[:, -1] > 0).astype(np.int64)
    missing = np.isnan(columns)
    filled = np.where(missing, np.nanmedian(columns, axis=0), columns)
    scaled = (filled - filled.mean(axis=0)) / filled.std(axis=0)
    often = missing.mean(axis=0) > 0.05
    return np.hstack([scaled, missing[:, often]]).astype(np.float32), disease, owners


def problems(data: Path, quick: bool) -> dict[str, tuple[dict, tuple | None]]:
    """Configurations by name, and the data of those that do not name it."""
    seeds = {"seeds": SEEDS[: 2 if quick else None], "baselines": []}
    found = {"digits": ({**preset("quickstart"), **seeds}, None)}
    if quick:
        found["digits"][0]["rounds"] = 2
        found["digits"][0]["data"] |= {"agents": 12, "unseen_agents": 2}
        return found
    if (data / "heart").is_dir():
        found["heart"] = ({**HEART, **seeds}, heart(data / "heart"))
    found["sinusoid"] = ({**preset("sinusoid"), **seeds}, None)
    if (data / "cifar-10-batches-bin").is_dir():
        os.environ["NUFED_DATA"] = str(data)
        cifar = preset("fig1-smoke")
        cifar["data"]["validation"] = 0.1
        found["fig1-smoke"] = ({**cifar, **seeds}, None)
    return found


def preset(name: str) -> dict:
    return load_config(name).model_dump(exclude_unset=True)


def old_rule(validate, steps: int, higher: bool) -> float:
    """The scale with the best mean validation score; ties go to the lower loss."""
    scores = {}

    def rank(k: int) -> tuple[float, float, int]:
        score = np.mean([agent.score[steps] for agent in scores[k]])
        loss = np.mean([agent.loss[steps] for agent in scores[k]])
        ranked = [
            x if math.isfinite(x) else -math.inf for x in (score * (1 - 2 * (not higher)), -loss)
        ]
        return (*ranked, -k)

    low, high = -2, 2
    while True:
        wanted = [k for k in range(low, high + 1) if k not in scores]
        scores |= dict(zip(wanted, validate([3.0**k for k in wanted]), strict=True))
        best = max(scores, key=rank)
        if best == low and low > -6:
            low -= 1
        elif best == high and high < 6:
            high += 1
        else:
            return 3.0**best


def compare(run: nufed.Run, data: tuple | None) -> list[dict]:
    """The mean test scores under each rule, by method and seed."""
    problem = Problem.rebuild(run.recorded, Given(data=data), trust=False)
    return [
        scored(run, problem, name, seed) for name in problem.algorithms for seed in run.config.seeds
    ]


def scored(run: nufed.Run, problem: Problem, name: str, seed: int) -> dict:
    """The mean test scores and losses under each rule, of one method and seed."""
    algorithm, objective = problem.algorithms[name], problem.objectives[seed]
    path = run.path / "methods" / name / f"seed-{seed}" / "model.safetensors"
    received = read_received(path, algorithm, objective)
    engine = BatchedEngine(objective, problem.federations[seed], seed)
    split, steps = engine.federation.split, run.config.steps_of(name)[0]

    def scores(part, agents, scales):
        states = {agent: {} for agent in agents}
        scoring = Scoring(steps, problem.measure, scales, part)
        return engine.evaluate_scales(algorithm, received, states, scoring)

    def validate(scales):
        return scores("validation", split.seen, scales)

    sizes = choose_step_sizes(validate, [steps], problem.measure, preferred(algorithm))
    old = old_rule(validate, steps, problem.measure.higher_is_better)
    scales = {"new": sizes.scale(steps), "old": old, "trained": 1.0}
    by_rule = dict(zip(scales, scores("test", split.agents, list(scales.values())), strict=True))
    return {
        "method": name,
        "seed": seed,
        "scales": scales,
        "undecided": sizes.chosen[0].undecided,
        "samples": sizes.samples,
        "scores": {r: float(np.mean([a.score[steps] for a in own])) for r, own in by_rule.items()},
        "losses": {r: float(np.mean([a.loss[steps] for a in own])) for r, own in by_rule.items()},
    }


def differences(rows: list[dict], higher: bool) -> list[dict]:
    """The new rule minus each other one, by method: mean over agents and seeds, in the metric's
    better direction, and the p-value of a t-test over the means of seeds."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        for against in ("trained", "old"):
            sign = 1 if higher else -1
            means = [sign * (row["scores"]["new"] - row["scores"][against]) for row in own]
            losses = [row["losses"][against] - row["losses"]["new"] for row in own]
            same = all(row["scales"]["new"] == row["scales"][against] for row in own)
            p = 1.0 if same or np.ptp(means) == 0 else stats.ttest_1samp(means, 0).pvalue
            half = stats.t.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / len(means) ** 0.5
            found.append(
                {
                    "method": method,
                    "against": against,
                    "gain": float(np.mean(means)),
                    "loss": float(np.mean(losses)),
                    "half_width": float(half),
                    "p": float(p),
                    "seeds": means,
                }
            )
    return found


def holm(rows: list[dict]) -> None:
    """Add the p-values corrected for the number of all comparisons."""
    highest = 0.0
    for place, row in enumerate(sorted(rows, key=lambda row: row["p"])):
        highest = max(highest, min(1.0, (len(rows) - place) * row["p"]))
        row["holm"] = highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--quick", action="store_true", help="two seeds of few rounds")
    options = parser.parse_args()
    results, every = {}, []
    for name, (config, data) in problems(options.data, options.quick).items():
        path = options.runs / name
        run = (
            nufed.resume(path, data=data)
            if path.exists()
            else nufed.run(config, data=data, out=path)
        )
        rows = compare(run, data)
        gains = differences(rows, run.measure.higher_is_better)
        results[name] = {"measure": run.measure.name, "rows": rows, "gains": gains}
        every += gains
    holm(every)
    options.out.write_text(json.dumps(finite(results), indent=1) + "\n")
    print(section(results))
    if options.out == RESULTS:
        text = PAGE.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{section(results)}\n{END}{after}")


def section(results: dict) -> str:
    """The table of docs/report.md: a line per problem and method."""
    titles = "problem|method|c, by seed|− as trained|− best score"
    titles += "|loss − as trained|loss − best score"
    lines = [f"| {titles.replace('|', ' | ')} |", "|---" * (titles.count("|") + 1) + "|"]
    for name, result in results.items():
        unit = -1 if result["measure"] == "loss" else 100  # of losses the sign is that of losses
        for method in dict.fromkeys(row["method"] for row in result["rows"]):
            gains = [gain for gain in result["gains"] if gain["method"] == method]
            scales = [f"{r['scales']['new']:.2g}" for r in result["rows"] if r["method"] == method]
            cells = [name, method, ", ".join(scales)]
            for gain in gains:
                star = "*" if gain["holm"] < 0.05 else ""
                half = abs(unit) * gain["half_width"]
                cells.append(f"{unit * gain['gain']:+.2f} ± {half:.2f}{star}")
            cells += [f"{-gain['loss']:+.3f}" for gain in gains]
            lines.append(
                f"| {' | '.join(cells)} |".replace("-0.00 ", "0.00 ").replace("-0.000", "0")
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
