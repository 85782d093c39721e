"""Summaries of run directories: the numbers that the page needs, small enough to commit."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from safetensors.torch import load_file

from nufed.evaluate import AgentScores
from nufed.lab.config.problem import build_module, build_samples
from nufed.lab.runs import Run
from nufed.lab.runs.results import Trained
from paper.stages import DELTAS, WHERE
from paper.tuning import Scores, best, next_points, step_size

Values = np.ndarray[Any, Any]
Lr = Literal["chosen", "as_trained"]  # the step size of fine-tuning
ONE, ACCURACY_RULE, LOSS_RULE = "one α for all", "accuracy", "loss"  # what α at use was chosen by


def summarise_run(stage: str, run: Run, seconds: float) -> dict[str, Any]:
    """A run as plain data; scores keep four digits."""
    config = run.config
    found = {
        **_about(stage, run, seconds),
        "methods": {
            name: {
                "settings": config.methods[name].model_dump(exclude_unset=True),
                "steps": config.steps_of(name),
                "engine": run.engines[name],
                **_costs(part),
                "seeds": {
                    s: _curves(trained, config.steps_of(name)) for s, trained in part.items()
                },
                **_seeds(part),
            }
            for name, part in run.methods.items()
        },
        "baselines": {name: _seeds(part) for name, part in run.baselines.items()},
        "failures": run.failures,
    }
    if stage == "delta":
        found["distance"] = {name: _distances(run, name) for name in run.methods}
    return found


def summarise_search(stage: str, run: Run, scores: Scores, seconds: float) -> dict[str, Any]:
    """The step sizes that a search tried and chose."""
    chosen = {}
    for method, own in scores.items():
        a, b = best(own)
        chosen[method] = {"adapt_lr": step_size(a), "meta_lr": step_size(b), "score": own[a, b]}
    tried = {
        method: [[step_size(a), step_size(b), *_short([score])] for (a, b), score in own.items()]
        for method, own in scores.items()
    }
    inside = {method: not next_points(method, own) for method, own in scores.items()}
    about = _about(stage, run, seconds)
    return {**about, "tried": tried, "chosen": chosen, "inside": inside}


def _about(stage: str, run: Run, seconds: float) -> dict[str, Any]:
    config = run.config.model_dump_json(exclude={"methods"}, exclude_none=True)
    rule = {"rule": LOSS_RULE} if run.step_sizes_chosen else {}
    return {"stage": stage, "seconds": seconds, "config": json.loads(config), **rule}


def _seeds(part: dict[int, Trained]) -> dict[str, Any]:
    """Final scores of single agents by seed: as trained, and with chosen step sizes."""
    found = {"agents": {seed: _agents(trained.scores) for seed, trained in part.items()}}
    if all(trained.chosen for trained in part.values()):
        found["agents_chosen"] = {s: _agents(t.chosen or []) for s, t in part.items()}
    if all(trained.step_sizes for trained in part.values()):
        found["step_sizes"] = {
            seed: [
                {"steps": own.steps, "scale": own.scale, "at_edge": own.at_edge}
                for own in trained.step_sizes.chosen
            ]
            for seed, trained in part.items()
            if trained.step_sizes
        }
    return found


def _costs(part: dict[int, Trained]) -> dict[str, float]:
    """Gradients and Hessian-vector products of one round."""
    line = next(iter(part.values())).metrics[-1]
    return {"gradients": line.gradients, "hvps": line.hvps}


def _curves(trained: Trained, steps: list[int]) -> dict[str, Any]:
    """Means over agents seen in training, by measure, number of steps shown, and round."""
    found = _curve({m.round: m.evaluation for m in trained.metrics if m.evaluation}, steps)
    chosen = {m.round: m.evaluation_chosen for m in trained.metrics if m.evaluation_chosen}
    return found | ({"chosen": _curve(chosen, steps)} if chosen else {})


def _curve(by_round: dict[int, dict[str, Any]], steps: list[int]) -> dict[str, Any]:
    seen = [groups["seen"] for groups in by_round.values()]
    return {"rounds": list(by_round)} | {
        measure: {step: _short(getattr(at, measure)[step] for at in seen) for step in steps}
        for measure in ("score", "balanced", "minority")
    }


def _agents(scores: list[AgentScores]) -> dict[str, Any]:
    """Final scores of single agents, by step."""
    return {
        "seen": [s.seen for s in scores],
        "minority_samples": [s.minority_samples for s in scores],
        **{m: [_short(getattr(s, m)) for s in scores] for m in ("score", "balanced", "minority")},
    }


def _short(values: Iterable[float | None]) -> list[float | None]:
    return [None if v is None or not np.isfinite(v) else round(v, 4) for v in values]


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
    path = WHERE.runs / "delta" / "methods" / method / f"seed-{seed}" / "model.safetensors"
    return load_file(path)["model"].double().numpy()


@dataclass(frozen=True)
class Summary:
    """A summary, read back."""

    data: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return self.data["config"]

    @property
    def rule(self) -> str:
        """What α at use was chosen by; summaries that do not say are of the older rule."""
        methods = self.data.get("methods", {}).values()
        chosen = "tried" in self.data or any("step_sizes" in own for own in methods)
        return self.data.get("rule", ACCURACY_RULE if chosen else ONE)

    @property
    def methods(self) -> list[str]:
        return list(self.data["methods"])

    @property
    def minutes(self) -> float:
        return self.data["seconds"] / 60

    @property
    def budget(self) -> float:
        """The gradient evaluations of FedAvg in all rounds."""
        return self.config["rounds"] * self.compute("fedavg")

    def compute(self, method: str) -> float:
        """Gradient evaluations of a round, a Hessian-vector product counted as two."""
        own = self.data["methods"][method]
        return own["gradients"] + 2 * own["hvps"]

    def rounds(self, method: str, lr: Lr = "chosen") -> list[int]:
        """The evaluated rounds."""
        return next(iter(self._curves(method, lr)))["rounds"]

    def curve(self, method: str, step: int, measure: str = "score", lr: Lr = "chosen") -> Values:
        """Means over agents by seed and round."""
        seeds = self._curves(method, lr)
        return np.array([seed[measure][str(step)] for seed in seeds], dtype=float)

    def at_round(self, method: str, step: int, round: int, measure: str = "score") -> Values:
        """Means over agents after one of the evaluated rounds, by seed."""
        return self.curve(method, step, measure)[:, self.rounds(method).index(round)]

    def agents(
        self,
        name: str,
        step: int,
        measure: str = "score",
        group: str = "seen",
        lr: Lr = "chosen",
    ) -> Values:
        """Final scores by seed and agent, with the chosen step size where one was chosen."""
        return np.array(
            [
                [at[step] for at, seen in zip(s[measure], s["seen"], strict=True) if seen == wanted]
                for s in self._finals(name, lr)
                for wanted in [group == "seen"]
            ],
            dtype=float,
        )

    def minority(self, name: str, step: int, group: str = "seen", lr: Lr = "chosen") -> Values:
        """Final accuracy on the minority samples of all agents of a group, by seed."""
        accuracy = self.agents(name, step, "minority", group, lr)
        counts = [
            [n for n, seen in zip(s["minority_samples"], s["seen"], strict=True) if seen == wanted]
            for s in self._finals(name, lr)
            for wanted in [group == "seen"]
        ]
        return np.array(
            [
                np.average(np.nan_to_num(own), weights=number) if any(number) else np.nan
                for own, number in zip(accuracy, counts, strict=True)
            ]
        )

    def chosen_lr(self, name: str, step: int) -> list[float]:
        """The step sizes that were chosen, by seed; empty where none was.

        For training alone it is the step size of training (β), for the others of fine-tuning (α).
        """
        settings = {**self.config["method"], **self._part(name).get("settings", {})}
        if name in self.data["baselines"]:  # they use the first method's settings
            first = next(iter(self.data["methods"].values()))
            settings = {**self.config["method"], **first["settings"]}
        base = settings["meta_lr" if name == "local" else "adapt_lr"]
        return [
            base * own["scale"]
            for seed in self._part(name).get("step_sizes", {}).values()
            for own in seed
            if own["steps"] == step
        ]

    def diverged(self) -> list[str]:
        """Trainings whose final models have a non-finite score for some agent."""
        return [
            f"{self.data['stage']}: {name}, seed {seed}"
            for name, own in self.data.get("methods", {}).items()
            for seed, scores in own["agents"].items()
            if any(score[step] is None for score in scores["score"] for step in own["steps"])
        ] + [f"{self.data['stage']}: {line}" for line in self.data.get("failures", ())]

    def _part(self, name: str) -> dict[str, Any]:
        methods = self.data["methods"]
        return methods[name] if name in methods else self.data["baselines"][name]

    def _curves(self, method: str, lr: Lr) -> Iterable[dict[str, Any]]:
        seeds = self.data["methods"][method]["seeds"].values()
        return [seed.get("chosen", seed) if lr == "chosen" else seed for seed in seeds]

    def _finals(self, name: str, lr: Lr) -> Iterable[dict[str, Any]]:
        part = self._part(name)
        found = part.get("agents_chosen") if lr == "chosen" else None
        return list((found or part["agents"]).values())


@cache
def summary(stage: str) -> Summary | None:
    """The summary of a stage, if it has been run."""
    path = WHERE.results / f"{stage}.json"
    return Summary(json.loads(path.read_text("utf-8"))) if path.exists() else None


def distances() -> dict[str, list[float]]:
    found = summary("delta")
    names = ["hf-auto", *(f"hf-{delta}" for delta in DELTAS)]
    return {name: found.data["distance"][name] for name in names} if found else {}
