"""Writes docs/results.md from the summaries: every number on it comes from there.

The words are in results.md.j2; the tables and the numbers in sentences are made here.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
import numpy as np

from nufed.runs.compare import Difference
from nufed.runs.results import Estimate
from paper.claims import BELOW, LITTLE, MATTERS, Claim, claims, lowest_final, rounds_to
from paper.figures import NAMES, NULL_STEPS, NULLS, all_figures, name
from paper.stages import ALPHAS, DELTAS, FOUR, GRID, ROUNDS, SEEDS, STAGES, TUNED_AT, alpha_stage
from paper.summary import Summary, Values, distances, summary

PAGE = Path("docs/results.md")
TEMPLATE = Path(__file__).parent / "results.md.j2"

Lines = Iterable[tuple[str, str, int]]


def write() -> Path:
    """Draw the figures and write the page; stages that were not run are named."""
    drawn = all_figures()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    runs = {stage.replace("-", "_").replace(".", "_"): summary(stage) for stage in STAGES}
    text = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        missing=[stage for stage in STAGES if not summary(stage)],
        image=lambda figure, words: f"![{words}](results/{drawn[figure].name})",
        drawn=drawn,
        found=claims(),
        claims_table=claims_table,
        figure_lines=figure_lines,
        scores_table=scores_table,
        rounds_table=rounds_table,
        choices_table=choices_table,
        delta_table=delta_table,
        alpha_table=alpha_table,
        tuning_table=tuning_table,
        paired_table=paired_table,
        compute_table=compute_table,
        stages_table=stages_table,
        four_lines=[(NAMES[m], m, 3) for m in FOUR],
        accuracy=accuracy,
        gain=gain,
        until=until,
        work=work,
        grid=", ".join(f"{'α' if k == 'adapt_lr' else 'β'} in {v}" for k, v in GRID.items()),
        matters=MATTERS,
        little=LITTLE,
        rounds=ROUNDS,
        seeds=len(SEEDS),
        tuned_at=TUNED_AT,
        minutes=sum(run.minutes for run in runs.values() if run),
        budget=budget(),
        **runs,
    )
    PAGE.write_text(text, "utf-8")
    return PAGE


def accuracy(
    run: Summary, method: str, step: int = 3, measure: str = "score", group: str = "seen"
) -> str:
    """A mean accuracy for a sentence."""
    values = (
        run.minority(method, step, group)
        if measure == "minority"
        else run.agents(method, step, measure, group)
    )
    return percent(values.mean())


def gain(run: Summary, a: str, b: str, steps: tuple[int, int] = (3, 3), group: str = "seen") -> str:
    """A paired difference of accuracies for a sentence, each after its number of steps."""
    mine, others = (run.agents(m, s, group=group) for m, s in zip((a, b), steps, strict=True))
    return points(Difference.paired(mine, others))


def until(run: Summary, method: str) -> str:
    """The rounds until a method is within half a point of the lowest final accuracy."""
    rounds = rounds_to(run, method, 3, lowest_final(run) - BELOW)
    return f"{rounds.mean():.0f}"


def work(run: Summary, method: str) -> str:
    """The same in gradient evaluations, a Hessian-vector product counted as two."""
    rounds = rounds_to(run, method, 3, lowest_final(run) - BELOW)
    return f"{rounds.mean() * run.compute(method):,.0f}"


def claims_table(found: Sequence[Claim]) -> str:
    rows = []
    for claim in found:
        d, factor = claim.difference, 100 if claim.unit == "points" else 1
        digits = 2 if claim.unit == "points" else 0
        agents = d.over_agents
        spread = f"± {factor * (d.over_seeds.half_width or 0):.{digits}f}"
        if agents is not None:
            spread += f" (agents ± {factor * (agents.half_width or 0):.{digits}f})"
        shown = f"{factor * d.mean:+.{digits}f} {claim.unit} {spread}"
        rows.append(
            [
                claim.figure,
                claim.sentence,
                claim.compared,
                claim.values,
                shown,
                f"**{claim.verdict}**",
            ]
        )
    headings = ["figure", "the paper says", "compared", "measured", "difference", ""]
    return table(headings, rows, texts=len(headings))


def figure_lines(run: Summary) -> Lines:
    """The lines of a figure: each method after its numbers of steps."""
    return [
        (name(method), method, steps)
        for method in run.methods
        for steps in run.data["methods"][method]["steps"]
    ]


def scores_table(run: Summary, lines: Lines, group: str = "seen") -> str:
    """Accuracy beside what it hides, for methods and null baselines."""
    nulls = [(NULLS[null], null, NULL_STEPS[null]) for null in run.data["baselines"]]
    majority = run.agents("majority", 0, group=group)
    rows = []
    for label, method, step in (*lines, *nulls):
        own = run.agents(method, step, group=group)
        before = run.agents(method, 0, group=group)
        rows.append(
            [
                label,
                str(step) if method not in ("majority", "local") else "–",
                percent(before.mean()),
                estimate(own.mean(axis=1)),
                points(Difference.paired(own, majority)) if method != "majority" else "–",
                estimate(run.agents(method, step, "balanced", group).mean(axis=1)),
                estimate(run.minority(method, step, group)),
            ]
        )
    headings = ["", "steps", "before", "after", "above majority, points", "balanced", "minority"]
    return table(headings, rows)


def rounds_table(run: Summary) -> str:
    """Accuracy had training stopped earlier: the paper does not say when it did."""
    rounds = [r for r in (0, 20, 50, 100, 200, 400) if r in run.rounds(run.methods[0])]
    rows = [
        [name(method), *(estimate(run.at_round(method, 3, round)) for round in rounds)]
        for method in run.methods
    ]
    return table(["after round", *map(str, rounds)], rows)


def choices_table(one: Summary) -> str:
    """Pixels and exhausted classes: the same round, the same seeds, another choice."""
    stages = {
        "pixels-symmetric": "pixels in −1 … 1",
        "pixels-standardised": "standardised pixels",
        "reuse": "classes never run out: agents may share samples",
    }
    runs = {label: run for stage, label in stages.items() if (run := summary(stage))}
    rows = []
    for label, run in {"as chosen": one, **runs}.items():
        for measure, words in (("score", "accuracy"), ("balanced", "balanced")):
            cells = [estimate(run.at_round(m, 3, ROUNDS, measure)[: len(SEEDS)]) for m in FOUR]
            nulls = run.agents("majority", 0, measure)[: len(SEEDS)]
            rows.append([f"{label}, {words}", *cells, percent(nulls.mean())])
    headings = [f"round {ROUNDS}, {len(SEEDS)} seeds", *(NAMES[m] for m in FOUR), "majority"]
    return table(headings, rows)


def delta_table(run: Summary) -> str:
    """Distance from exact and accuracy by δ."""
    rows = []
    for method in ("exact", "hf-auto", *(f"hf-{delta}" for delta in DELTAS)):
        far = distances().get(method)
        rows.append(
            [
                {"exact": "exact", "hf-auto": "automatic δ"}.get(method, f"δ = {method[3:]}"),
                "–" if far is None else f"{np.mean(far):.2g}",
                percent(run.agents(method, 3).mean()),
                percent(run.agents(method, 3, "balanced").mean()),
                percent(run.minority(method, 3).mean()),
            ]
        )
    return table(["", "distance from exact", "accuracy", "balanced", "minority"], rows)


def alpha_table() -> str:
    """Accuracy over α_d, on agents seen in training and on others."""
    rows = []
    for alpha in ALPHAS:
        stage, _ = alpha_stage(alpha)
        run = summary(stage)
        for group in ("seen", "unseen") if run else ():
            cells = [estimate(run.agents(m, 3, group=group).mean(axis=1)) for m in FOUR]
            nulls = [
                percent(run.agents(null, NULL_STEPS[null], group=group).mean()) for null in NULLS
            ]
            rows.append(["∞ (IID)" if np.isinf(alpha) else f"{alpha:g}", group, *cells, *nulls])
    return table(["α_d", "agents", *(NAMES[m] for m in FOUR), *NULLS.values()], rows)


def tuning_table(tried: Summary, tuned: Summary, plain: Summary) -> str:
    """Every method with the paper's step sizes and with its best ones, then the baselines."""
    lines = [
        (
            NAMES[method],
            method,
            f"{words}: α = {own['adapt_lr']:g}, β = {own['meta_lr']:g}",
            run,
        )
        for method in FOUR
        for words, run, own in (
            ("the paper's", plain, plain.config["method"]),
            ("tuned", tuned, tried.data["chosen"][method]),
        )
    ]
    nulls = [
        (NULLS[null], null, words, run)
        for words, run in (("the paper's", plain), ("as FedAvg tuned", tuned))
        for null in run.data["baselines"]
        if null != "majority" or run is plain
    ]
    rows = [
        [
            label,
            words,
            estimate(run.agents(which, step).mean(axis=1)),
            estimate(run.agents(which, step, group="unseen").mean(axis=1)),
            estimate(run.agents(which, step, "balanced").mean(axis=1)),
            estimate(run.minority(which, step)),
        ]
        for label, which, words, run in (*lines, *nulls)
        for step in [NULL_STEPS.get(which, 3)]
    ]
    headings = ["", "step sizes", "seen agents", "unseen agents", "balanced", "minority"]
    return table(headings, rows, texts=2)


def paired_table(run: Summary, group: str = "seen") -> str:
    """Every method against FedAvg and Per-FedAvg, paired."""
    rows = [
        [
            NAMES[method],
            *(
                "–" if method == other else f"{gain(run, method, other, group=group)}"
                for other in ("fedavg", "per-fedavg-fo")
            ),
        ]
        for method in list(FOUR)[1:]
    ]
    return table(["points (paired)", "above FedAvg", "above Per-FedAvg (FO)"], rows)


def budget() -> float:
    """The gradient evaluations that every method may use at equal compute."""
    run = summary("compute-fedavg")
    return run.config["rounds"] * run.compute("fedavg") if run else 0.0


def compute_table(fedavg: Summary, per_fedavg: Summary, one: Summary) -> str:
    rows = []
    for run, method in (
        (fedavg, "fedavg"),
        (per_fedavg, "per-fedavg-fo"),
        (one, "gmeta-fo"),
        (one, "gmeta-exact"),
    ):
        last = max(r for r in run.rounds(method) if r * run.compute(method) <= budget())
        cells = [
            estimate(run.at_round(method, 3, last, measure)[: len(SEEDS)])
            for measure in ("score", "balanced", "minority")
        ]
        rows.append([NAMES[method], str(last), *cells])
    return table(["", "rounds", "accuracy", "balanced", "minority"], rows)


def stages_table() -> str:
    rows = [
        [f"`{stage}`", STAGES[stage].about, f"{run.minutes:.1f}"]
        for stage in STAGES
        if (run := summary(stage))
    ]
    return table(["stage", "what", "minutes"], rows, texts=2)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table in Markdown whose first columns are texts and whose others are numbers."""
    lines = [headings, [*["---"] * texts, *["---:"] * (len(headings) - texts)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f} %"


def estimate(by_seed: Values) -> str:
    """A mean over seeds with its interval."""
    there = by_seed[~np.isnan(by_seed)].tolist()  # a seed may have no minority samples
    if not there:
        return "–"
    found = Estimate.of(there)
    spread = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    return f"{100 * found.mean:.1f}{spread} %"


def points(difference: Difference) -> str:
    spread = 100 * max(difference.high - difference.mean, 0)
    return f"{100 * difference.mean:+.2f} ± {spread:.2f}"
