"""What of a run directory the page needs, small enough to keep beside it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from safetensors.torch import load_file

from nufed.runs import Run
from nufed.runs.build import build_module, build_samples
from nufed.runs.results import Trained
from paper.stages import DELTAS, FOUR, GRID, RESULTS, RUNS

Values = np.ndarray[Any, Any]


def summarise_run(stage: str, run: Run) -> dict[str, Any]:
    """A run as plain data; scores keep four digits."""
    config = run.config
    found = {
        "stage": stage,
        "seconds": json.loads((run.path / "stage.json").read_text("utf-8"))["seconds"],
        "config": json.loads(config.model_dump_json(exclude={"methods"}, exclude_none=True)),
        "methods": {
            name: {
                "settings": config.methods[name].model_dump(exclude_unset=True),
                "steps": config.steps_of(name),
                "engine": run.engines[name],
                **_costs(part),
                "seeds": {
                    s: _curves(trained, config.steps_of(name)) for s, trained in part.items()
                },
                "agents": {seed: _agents(trained) for seed, trained in part.items()},
            }
            for name, part in run.methods.items()
        },
        "baselines": {
            name: {seed: _agents(trained) for seed, trained in part.items()}
            for name, part in run.baselines.items()
        },
        "failures": run.failures,
    }
    if stage == "tuning":
        found["chosen"] = {name: _best(run, name) for name in FOUR}
    if stage == "delta":
        found["distance"] = {name: _distances(run, name) for name in run.methods}
    return found


def _costs(part: dict[int, Trained]) -> dict[str, float]:
    """Gradients and Hessian-vector products of one round."""
    line = next(iter(part.values())).metrics[-1]
    return {"gradients": line["gradients"], "hvps": line["hvps"]}


def _curves(trained: Trained, steps: list[int]) -> dict[str, Any]:
    """Means over agents seen in training, by measure, number of steps shown, and round."""
    lines = [m for m in trained.metrics if "evaluation" in m]
    seen = [m["evaluation"]["seen"] for m in lines]
    return {"rounds": [m["round"] for m in lines]} | {
        measure: {step: _short(at[measure][step] for at in seen) for step in steps}
        for measure in ("score", "balanced", "minority")
    }


def _agents(trained: Trained) -> dict[str, Any]:
    """Final scores of single agents, by step."""
    scores = trained.scores
    return {
        "seen": [s.seen for s in scores],
        "minority_samples": [s.minority_samples for s in scores],
        **{m: [_short(getattr(s, m)) for s in scores] for m in ("score", "balanced", "minority")},
    }


def _short(values: Iterable[float]) -> list[float | None]:
    return [round(v, 4) if np.isfinite(v) else None for v in values]


def _best(run: Run, method: str) -> dict[str, float]:
    """The step sizes with the best mean validation accuracy after the shown number of steps."""
    assert run.config.eval_on == "validation"
    rows = {row.name: row.after.mean for row in run.rows() if row.group == "seen"}
    pairs = [(a, b) for a in GRID["adapt_lr"] for b in GRID["meta_lr"]]
    a, b = max(pairs, key=lambda pair: np.nan_to_num(rows.get(f"{method}_{pair[0]}_{pair[1]}", 0)))
    return {"adapt_lr": a, "meta_lr": b, "score": round(rows[f"{method}_{a}_{b}"], 4)}


def _distances(run: Run, method: str) -> list[float]:
    """‖w − w_exact‖ / ‖w_exact − w_start‖ of the final models, seed by seed."""
    samples = build_samples(run.config.data)
    distances = []
    for seed in run.methods[method]:
        module = build_module(run.config, samples, seed)
        start = np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])
        exact, own = (_model(name, seed) for name in ("exact", method))
        distances.append(float(np.linalg.norm(own - exact) / np.linalg.norm(exact - start)))
    return distances


def _model(method: str, seed: int) -> Values:
    path = RUNS / "delta" / "methods" / method / f"seed-{seed}" / "model.safetensors"
    return load_file(path)["model"].double().numpy()


@dataclass(frozen=True)
class Summary:
    """A summary, read back."""

    data: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return self.data["config"]

    @property
    def methods(self) -> list[str]:
        return list(self.data["methods"])

    @property
    def minutes(self) -> float:
        return self.data["seconds"] / 60

    def compute(self, method: str) -> float:
        """Gradient evaluations of a round, a Hessian-vector product counted as two."""
        own = self.data["methods"][method]
        return own["gradients"] + 2 * own["hvps"]

    def rounds(self, method: str) -> list[int]:
        return next(iter(self.data["methods"][method]["seeds"].values()))["rounds"]

    def curve(self, method: str, step: int, measure: str = "score") -> Values:
        """Means over agents by seed and round."""
        seeds = self.data["methods"][method]["seeds"].values()
        return np.array([seed[measure][str(step)] for seed in seeds], dtype=float)

    def at_round(self, method: str, step: int, round: int, measure: str = "score") -> Values:
        """Means over agents after one of the evaluated rounds, by seed."""
        return self.curve(method, step, measure)[:, self.rounds(method).index(round)]

    def agents(self, name: str, step: int, measure: str = "score", group: str = "seen") -> Values:
        """Final scores by seed and agent."""
        methods, nulls = self.data["methods"], self.data["baselines"]
        seeds = (methods[name]["agents"] if name in methods else nulls[name]).values()
        return np.array(
            [
                [at[step] for at, seen in zip(s[measure], s["seen"], strict=True) if seen == wanted]
                for s in seeds
                for wanted in [group == "seen"]
            ],
            dtype=float,
        )

    def minority(self, name: str, step: int, group: str = "seen") -> Values:
        """Final accuracy on the minority samples of all agents of a group, by seed."""
        methods, nulls = self.data["methods"], self.data["baselines"]
        seeds = (methods[name]["agents"] if name in methods else nulls[name]).values()
        right = self.agents(name, step, "minority", group)
        counts = [
            [n for n, seen in zip(s["minority_samples"], s["seen"], strict=True) if seen == wanted]
            for s in seeds
            for wanted in [group == "seen"]
        ]
        return np.array(
            [
                np.average(np.nan_to_num(own), weights=number) if any(number) else np.nan
                for own, number in zip(right, counts, strict=True)
            ]
        )


@cache
def summary(stage: str) -> Summary | None:
    """The summary of a stage, if it has been run."""
    path = RESULTS / f"{stage}.json"
    return Summary(json.loads(path.read_text("utf-8"))) if path.exists() else None


def distances() -> dict[str, list[float]]:
    found = summary("delta")
    names = ["hf-auto", *(f"hf-{delta}" for delta in DELTAS)]
    return {name: found.data["distance"][name] for name in names} if found else {}
