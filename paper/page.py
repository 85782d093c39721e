"""Writes docs/results.md from the summaries, the source of all its numbers.

The text is in results.md.j2 and in_short.md.j2; tables and numbers in sentences are made here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
import numpy as np

from nufed.lab.runs.results import Estimate
from paper.claims import (
    RELEVANT,
    SMALL,
    TARGET_MARGIN,
    Claim,
    fair_claims,
    lowest_final,
    protocol_claims,
    rounds_to,
)
from paper.differences import Difference, tenths
from paper.figures import NAMES, NULL_STEPS, NULLS, all_figures, name
from paper.stages import (
    ALPHAS,
    DELTAS,
    FOUR,
    NUS,
    ROUNDS,
    SEEDS,
    STAGES,
    TUNED_AT,
    WHERE,
    alpha_stage,
)
from paper.summary import (
    ACCURACY_RULE,
    LOSS_RULE,
    ONE,
    Lr,
    Summary,
    Values,
    distances,
    summary,
)

Lines = Iterable[tuple[str, str, int]]


def write() -> Path:
    """Draw the figures and write the page; stages that were not run are named."""
    drawn = all_figures()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    runs = {stage.replace("-", "_").replace(".", "_"): summary(stage) for stage in STAGES}
    text = environment.get_template("results.md.j2").render(
        missing=[stage for stage in STAGES if not summary(stage)],
        image=lambda figure, words: f"![{words}](results/{drawn[figure].name})",
        drawn=drawn,
        protocol=protocol_claims(),
        fair=fair_claims(),
        verdicts=verdicts,
        claims_table=claims_table,
        figure_lines=figure_lines,
        scores_table=scores_table,
        rounds_table=rounds_table,
        choices_table=choices_table,
        delta_table=delta_table,
        alpha_table=alpha_table,
        tuning_table=tuning_table,
        paired_table=paired_table,
        steps_table=steps_table,
        compute_table=compute_table,
        stages_table=stages_table,
        rules_table=rules_table,
        older=sum(run.minutes for run in runs.values() if run and run.rule == ACCURACY_RULE) / 60,
        four_lines=[(NAMES[m], m, 3) for m in FOUR],
        accuracy=accuracy,
        gain=gain,
        until=until,
        work=work,
        search=search,
        trainings=trainings,
        matters=RELEVANT,
        little=SMALL,
        rounds=ROUNDS,
        seeds=len(SEEDS),
        tuned_at=TUNED_AT,
        minutes=sum(run.minutes for run in runs.values() if run),
        diverged=[line for run in runs.values() if run for line in run.diverged()],
        **runs,
    )
    WHERE.page.write_text(text, "utf-8")
    return WHERE.page


def accuracy(
    run: Summary,
    method: str,
    step: int = 3,
    measure: str = "score",
    group: str = "seen",
    lr: Lr = "chosen",
) -> str:
    """A mean accuracy for a sentence."""
    values = (
        run.minority(method, step, group, lr)
        if measure == "minority"
        else run.agents(method, step, measure, group, lr)
    )
    return percent(values.mean())


def gain(
    run: Summary,
    a: str,
    b: str,
    steps: tuple[int, int] = (3, 3),
    group: str = "seen",
    lr: Lr = "chosen",
) -> str:
    """A paired difference of accuracies for a sentence, each after its number of steps."""
    mine, others = (
        run.agents(m, s, group=group, lr=lr) for m, s in zip((a, b), steps, strict=True)
    )
    return points(Difference.paired(mine, others))


def until(run: Summary, method: str, lr: Lr = "chosen") -> str:
    """The rounds until a method is within half a point of the lowest final accuracy."""
    rounds = rounds_to(run, method, 3, lowest_final(run, lr) - TARGET_MARGIN, lr)
    return f"{rounds.mean():.0f}"


def work(run: Summary, method: str, lr: Lr = "chosen") -> str:
    """The same in gradient evaluations, a Hessian-vector product counted as two."""
    rounds = rounds_to(run, method, 3, lowest_final(run, lr) - TARGET_MARGIN, lr)
    return f"{rounds.mean() * run.compute(method):,.0f}"


def verdicts(found: Sequence[Claim]) -> str:
    """How many claims held, as text."""
    counts = Counter(claim.verdict for claim in found)
    kinds = {
        "held": "held",
        "not held": "did not hold",
        "undecided": "undecided",
        "not testable": "not testable (the target is reached before training)",
        "mixed": "mixed (their comparisons disagree)",
    }
    return ", ".join(f"{counts[kind]} {words}" for kind, words in kinds.items() if counts[kind])


def claims_table(found: Sequence[Claim]) -> str:
    rows = []
    for claim in found:
        for number, comparison in enumerate(claim.comparisons):
            d, factor = comparison.difference, 100 if comparison.unit == "points" else 1
            digits = 2 if comparison.unit == "points" else 0
            agents = d.over_agents
            spread = f"± {factor * (d.over_seeds.half_width or 0):.{digits}f}"
            if agents is not None:
                spread += f" (agents ± {factor * (agents.half_width or 0):.{digits}f})"
            rows.append(
                [
                    "" if number else claim.sentence,
                    "" if number else f"**{claim.verdict}**",
                    comparison.compared,
                    comparison.values,
                    f"{factor * d.mean:+.{digits}f} {comparison.unit} {spread}",
                    comparison.verdict,
                ]
            )
    headings = ["the paper says", "claim", "compared", "measured", "difference", ""]
    return table(headings, rows, texts=len(headings))


def search(found: Summary) -> str:
    """The size of a search, and whether the best step sizes lie inside the grid."""
    tried = {method: len(points) for method, points in found.data["tried"].items()}
    counts = ", ".join(f"{NAMES[method]} {number}" for method, number in tried.items())
    outside = [NAMES[m] for m, inside in found.data["inside"].items() if not inside]
    where = f"still on an edge: {', '.join(outside)}" if outside else "all inside the grid"
    return f"trainings: {counts}; best step sizes {where}"


def figure_lines(run: Summary) -> Lines:
    """The lines of a figure: each method after its numbers of steps."""
    return [
        (name(method), method, steps)
        for method in run.methods
        for steps in run.data["methods"][method]["steps"]
    ]


def scores_table(run: Summary, lines: Lines, group: str = "seen") -> str:
    """Accuracy, balanced and minority accuracy, for methods and null baselines.

    Where step sizes were chosen, also with the one of training.
    """
    nulls = [(NULLS[null], null, NULL_STEPS[null]) for null in run.data["baselines"]]
    majority = run.agents("majority", 0, group=group)
    lines = list(lines)
    chosen = any(run.chosen_lr(method, step) for _, method, step in lines)
    rows = []
    for label, method, step in (*lines, *nulls):
        own = run.agents(method, step, group=group)
        before = run.agents(method, 0, group=group)
        trained = run.agents(method, step, group=group, lr="as_trained")
        values = run.chosen_lr(method, step)
        sizes = [span(values), estimate(trained.mean(axis=1)) if values else "–"] if chosen else []
        rows.append(
            [
                label,
                str(step) if method not in ("majority", "local") else "–",
                percent(before.mean()),
                estimate(own.mean(axis=1)),
                *sizes,
                points(Difference.paired(own, majority)) if method != "majority" else "–",
                estimate(run.agents(method, step, "balanced", group).mean(axis=1)),
                estimate(run.minority(method, step, group)),
            ]
        )
    sizes = ["chosen α", "with α as trained"] if chosen else []
    headings = ["", "steps", "before", "after", *sizes, "above majority, points", "balanced"]
    return table([*headings, "minority"], rows)


def span(values: Sequence[float]) -> str:
    """Step sizes, from the smallest to the largest over seeds."""
    texts = [f"{value:.2g}" for value in sorted(set(values))]
    return "–" if not texts else texts[0] if len(texts) == 1 else f"{texts[0]} … {texts[-1]}"


def rounds_table(run: Summary) -> str:
    """Accuracy after fewer rounds: the paper does not state the number of rounds."""
    rounds = [r for r in (0, 20, 50, 100, 200, 400) if r in run.rounds(run.methods[0])]
    rows = [
        [name(method), *(estimate(run.at_round(method, 3, round)) for round in rounds)]
        for method in run.methods
    ]
    return table(["after round", *map(str, rounds)], rows)


def choices_table(one: Summary) -> str:
    """Other choices of pixels and of exhausted classes, at the same round and seeds."""
    stages = {
        "fair-standardised": "standardised pixels",
        "pixels-symmetric": "pixels in −1 … 1",
        "reuse": "classes never exhausted: agents may share samples",
    }
    runs = {label: run for stage, label in stages.items() if (run := summary(stage))}
    rows = []
    last = min(run.config["rounds"] for run in runs.values())
    for label, run in {"as chosen": one, **runs}.items():
        for measure, words in (("score", "accuracy"), ("balanced", "balanced")):
            cells = [estimate(run.at_round(m, 3, last, measure)[: len(SEEDS)]) for m in FOUR]
            nulls = run.agents("majority", 0, measure)[: len(SEEDS)]
            rows.append([f"{label}, {words}", *cells, percent(nulls.mean())])
    headings = [f"round {last}, {len(SEEDS)} seeds", *(NAMES[m] for m in FOUR), "majority"]
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


def tuning_table(tried: Summary, tuned: Summary) -> str:
    """Every method with its best step sizes, then the baselines."""
    lines = []
    for method in FOUR:
        own = tried.data["chosen"][method]
        alpha = "" if method == "fedavg" else f"α = {own['adapt_lr']:g}, "
        lines.append((NAMES[method], method, f"{alpha}β = {own['meta_lr']:g}"))
    for null in tuned.data["baselines"]:
        words = f"β = {span(tuned.chosen_lr(null, 0))}" if null == "local" else "–"
        lines.append((NULLS[null], null, words))
    rows = []
    for label, which, words in lines:
        step = NULL_STEPS.get(which, 3)
        chosen = "–" if which == "local" else span(tuned.chosen_lr(which, step))
        rows.append(
            [
                label,
                words,
                chosen,
                estimate(tuned.agents(which, step).mean(axis=1)),
                estimate(tuned.agents(which, step, group="unseen").mean(axis=1)),
                estimate(tuned.agents(which, step, "balanced").mean(axis=1)),
                estimate(tuned.minority(which, step)),
            ]
        )
    headings = ["", "trained with", "α at evaluation", "seen agents", "unseen agents"]
    return table([*headings, "balanced (seen)", "minority (seen)"], rows, texts=2)


def paired_table(run: Summary, group: str = "seen") -> str:
    """Every method against FedAvg, Per-FedAvg and training alone, paired."""
    others = {"fedavg": 3, "per-fedavg-fo": 3, "local": 0}
    rows = [
        [
            NAMES[method],
            *(
                "–" if method == other else gain(run, method, other, (3, step), group)
                for other, step in others.items()
            ),
        ]
        for method in FOUR
    ]
    names = [{**NAMES, **NULLS}[other] for other in others]
    return table(["points (paired)", *(f"minus {name}" for name in names)], rows)


def steps_table(run: Summary) -> str:
    """Training for ν steps minus FedAvg and Per-FedAvg, by steps in evaluation, paired."""
    steps = [s for s in NUS if s]
    rows = [
        [
            f"ν = {nu} minus ν = {base}",
            *(gain(run, f"nu-{nu}", f"nu-{base}", (s, s)) for s in steps),
        ]
        for base in (0, 1)
        for nu in NUS
        if nu > base
    ]
    return table(["points (paired)", *(f"after {s}" for s in steps)], rows)


def trainings(found: Summary, method: str) -> int:
    """How many trainings a search made for a method."""
    return len(found.data["tried"][method])


def compute_table(run: Summary) -> str:
    """The four methods when each has evaluated as many gradients as FedAvg did."""
    rows = []
    for method in FOUR:
        last = max(r for r in run.rounds(method) if r * run.compute(method) <= run.budget)
        cells = [
            estimate(run.at_round(method, 3, last, measure))
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


def rules_table() -> str:
    """Which stages rest on which choice of α at use."""
    about = {
        ONE: "one for all methods, that of training; so do the columns *with α as trained*",
        ACCURACY_RULE: "every method's own, by validation *accuracy*, in powers of 3",
        LOSS_RULE: "every method's own, by validation *loss*, with a margin for noise and in "
        "factors of 1.5 at the best: nufed's rule",
    }
    stages: dict[str, list[str]] = {rule: [] for rule in about}
    for stage in STAGES:
        if run := summary(stage):
            stages[run.rule].append(f"`{stage}`")
    rows = [[words, ", ".join(stages[rule]) or "none yet"] for rule, words in about.items()]
    return table(["α at use", "stages ([run time](#run-time))"], rows, texts=2)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table in Markdown whose first columns are texts and whose others are numbers."""
    lines = [headings, [*["---"] * texts, *["---:"] * (len(headings) - texts)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{tenths(value)} %"


def estimate(by_seed: Values) -> str:
    """A mean over seeds with its interval; seeds without a value are counted, not hidden.

    A seed has none where training diverged, or where no agent holds minority samples.
    """
    defined = by_seed[~np.isnan(by_seed)].tolist()
    if not defined:
        return "–"
    found = Estimate.of(defined)
    spread = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    seeds = f" ({len(defined)} of {len(by_seed)} seeds)" if len(defined) < len(by_seed) else ""
    return f"{tenths(found.mean)}{spread} %{seeds}"


def points(difference: Difference) -> str:
    """A difference in points with its interval over seeds."""
    if np.isnan(difference.mean):
        return "diverged"
    return f"{100 * difference.mean:+.2f} ± {100 * (difference.over_seeds.half_width or 0):.2f}"
