"""When training for ν > 1 steps pays on quadratics: predicted, and measured by training with nufed.

Agents measure y = g·⟨u, x⟩ with gains g between 1/√κ and 1 and fit x: their loss has the curvature
g² in all directions. Their optima are θ/g (correlated with curvature: uncalibrated sensors) or
θ·(1 + noise). Trained with mini-batches on 40 agents and scored on 80 unseen ones after 1, 3 and
10 steps of one size. Writes docs/results/nu-gap.json and .svg, and docs/when_nu_pays.md.

    python benchmarks/nu_gap.py           # trainings that are in the JSON file are not repeated
    python benchmarks/nu_gap.py --page    # only the chart and the page

Finished trainings are kept when it is interrupted. One or two minutes of a core.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import altair as alt
import numpy as np
import torch
import vl_convert
from jinja2 import Environment, StrictUndefined
from rich.progress import track
from scipy import stats
from torch import nn

from nufed import Federation, Objective, fedavg, gmeta
from nufed.data import as_samples, make_split
from nufed.evaluate import Measure
from nufed.simulation import BatchedEngine, train
from nufed.theory import Direction, Weighting, largest_gap

RESULTS, PAGE = Path("docs/results/nu-gap.json"), Path("docs/when_nu_pays.md")
TEMPLATE = Path(__file__).with_name("when_nu_pays.md.j2")
BOARD = Path("docs/results/nu-board.json")  # sentences by name of a slot, made by the board
ALPHA = 0.5  # in training and at use; the largest curvature is 1
STEPS = (1, 3, 10)
METHODS = {
    "FedAvg, τ = 1": Weighting(0),
    "FedAvg, τ = 10": Weighting(0, local_steps=10, beta=ALPHA),
    "ν = 1": Weighting(1, ALPHA),
    "ν = 3": Weighting(3, ALPHA),
    "ν = 10": Weighting(10, ALPHA),
}
BASE = "ν = 1"
OPTIMA = ("correlated", "independent")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurement."""

    kappas: tuple[int, ...] = (4, 16, 100)
    seeds: int = 3
    agents: tuple[int, int] = (40, 80)  # trained on, unseen
    samples: int = 250
    rounds: int = 20
    methods: tuple[str, ...] = tuple(METHODS)


def problem(
    kappa: float, optima: str, seed: int, sizes: Sizes
) -> tuple[Federation, list[Direction]]:
    """The agents' samples, and curvatures and optima along θ of those seen and unseen."""
    rng = np.random.default_rng([seed, kappa, OPTIMA.index(optima)])
    agents, inputs = sum(sizes.agents), 3
    gains = kappa ** rng.uniform(-0.5, 0, agents)
    places = 1 / gains if optima == "correlated" else 1 + rng.normal(size=agents)
    theta = rng.normal(size=inputs)
    theta /= np.linalg.norm(theta)
    scaled = gains[:, None, None] * rng.normal(size=(agents, sizes.samples, inputs))
    targets = np.einsum("and,d,a->an", scaled, theta, places)
    rows = np.split(np.arange(agents * sizes.samples), agents)
    unseen = sizes.agents[1]
    split = make_split(rows, seed, validation=0.0, test=0.2, unseen_agents=unseen)
    samples = as_samples((scaled.reshape(-1, inputs), targets.reshape(-1, 1)))
    groups = (sorted(set(split.agents) - set(split.unseen)), split.unseen)
    directions = [Direction([gains[a] ** 2 for a in g], [places[a] for a in g]) for g in groups]
    return Federation(samples, split), directions


def half_mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * ((outputs - targets.reshape(outputs.shape)) ** 2).mean()


def measured(data: Federation, method: Weighting, seen: Direction, sizes: Sizes, seed: int) -> list:
    """The mean loss of unseen agents after 0 … 10 steps, from the model that nufed trains."""
    torch.manual_seed(seed)
    objective = Objective(nn.Linear(3, 1, bias=False), half_mean_square)
    engine = BatchedEngine(objective, data, seed)
    settings: dict[str, Any] = {"adapt_lr": ALPHA, "batch_size": 40}
    if method.beta:
        algorithm = fedavg(local_steps=method.local_steps, meta_lr=method.beta, **settings)
    else:  # with one local update the size of β moves nothing but the speed
        beta = 0.5 / fmean(method.weight(c) for c in seen.curvatures)
        algorithm = gmeta(adapt_steps=method.steps, local_steps=1, meta_lr=beta, **settings)
    start = objective.initial()
    *_, last = train(algorithm, engine, start, rounds=sizes.rounds, participation=1.0)
    states = {agent: {} for agent in data.split.unseen}
    measure = Measure("loss", None)
    scores = engine.evaluate(algorithm, last.server, states, steps=max(STEPS), measure=measure)
    return [fmean(agent.loss[step] for agent in scores) for step in range(max(STEPS) + 1)]


def compute(path: Path, sizes: Sizes) -> dict[str, Any]:
    """All trainings, each kept in the file as soon as it is done."""
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    todo = [
        (optima, kappa, seed)
        for optima in OPTIMA
        for kappa in sizes.kappas
        for seed in range(sizes.seeds)
    ]
    for optima, kappa, seed in track(todo, "problems"):
        missing = [m for m in sizes.methods if f"{optima}/{kappa}/{seed}/{m}" not in found]
        if missing:
            data, (seen, unseen) = problem(kappa, optima, seed, sizes)
        for name in missing:
            method = METHODS[name]
            w = seen.stationary(method)
            found[f"{optima}/{kappa}/{seed}/{name}"] = {
                "measured": measured(data, method, seen, sizes, seed),
                "predicted": [unseen.loss(w, k, ALPHA) for k in range(max(STEPS) + 1)],
            }
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return found


def ratios(found: Mapping[str, Any], which: str) -> dict[tuple[str, str, str, int], list[float]]:
    """Loss divided by that of ν = 1, by optima, κ, method and k: one number per seed."""
    table: dict[tuple[str, str, str, int], list[float]] = {}
    for key, row in found.items():
        optima, kappa, seed, method = key.split("/")
        base = found.get(f"{optima}/{kappa}/{seed}/{BASE}")
        for k in STEPS if base else ():  # without it: not trained yet
            ratio = row[which][k] / base[which][k]
            table.setdefault((optima, kappa, method, k), []).append(ratio)
    return table


def planned(sizes: Sizes) -> int:
    """How many trainings the measurement has."""
    return len(OPTIMA) * len(sizes.kappas) * sizes.seeds * len(sizes.methods)


def half_width(values: list[float]) -> str:
    """Of the 95 % interval of a mean, by Student's t."""
    if len(values) < 2:
        return "–"
    t = float(stats.t.ppf(0.975, len(values) - 1))
    return f"{t * stdev(values) / math.sqrt(len(values)):.2f}"


def measured_table(found: Mapping[str, Any]) -> Iterator[str]:
    predicted, seen = ratios(found, "predicted"), ratios(found, "measured")
    yield "| optima | κ | k | " + " | ".join(m for m in METHODS if m != BASE) + " |"
    yield "|---|---:|---:|" + "---:|" * (len(METHODS) - 1)
    for optima, kappa, k in dict.fromkeys((o, kappa, k) for o, kappa, _, k in predicted):
        cells = []
        for method in METHODS:
            values = seen.get((optima, kappa, method, k))
            if method != BASE and values:
                own = fmean(predicted[optima, kappa, method, k])
                cells.append(f"{own:.2f} / {fmean(values):.2f} ± {half_width(values)}")
        yield f"| {optima} | {kappa} | {k} | {' | '.join(cells)} |"


def largest_error(found: Mapping[str, Any]) -> tuple[float, float]:
    """The median and largest relative difference of measured and predicted ratios."""
    predicted, seen = ratios(found, "predicted"), ratios(found, "measured")
    off = [
        abs(a / b - 1)
        for key, values in seen.items()
        if key[2] != BASE
        for a, b in zip(values, predicted[key], strict=True)
    ]
    return median(off), max(off)


def chart(found: Mapping[str, Any]) -> Any:
    """Lines: predicted. Points: measured, with the range over seeds."""
    rows = []
    predicted, seen = ratios(found, "predicted"), ratios(found, "measured")
    for (optima, kappa, method, k), values in seen.items():
        own = fmean(predicted[optima, kappa, method, k])
        row = {"κ": int(kappa), "training": method, "k": f"{k} step{'s'[: k > 1]} at use"}
        row |= {"optima": f"optima {optima}", "predicted": own, "measured": fmean(values)}
        rows.append({**row, "low": min(values), "high": max(values)})
    names = list(METHODS)
    colour = alt.Color(
        "training:N",
        sort=names,
        scale=alt.Scale(
            domain=names, range=["#999999", "#E69F00", "#000000", "#56B4E9", "#0072B2"]
        ),
    )
    ticks = sorted({row["κ"] for row in rows})
    x = alt.X(
        "κ:Q",
        scale=alt.Scale(type="log", domain=[0.8 * ticks[0], 1.25 * ticks[-1]]),
        axis=alt.Axis(values=ticks, format="d"),
        title="κ, largest / smallest curvature",
    )
    y = "loss ÷ loss of ν = 1"
    log = alt.Scale(type="log", nice=False)
    base = alt.Chart().encode(x=x, color=colour)
    lines = base.mark_line().encode(alt.Y("predicted:Q", scale=log, title=y))
    points = base.mark_point(filled=True, size=45, opacity=1).encode(alt.Y("measured:Q"))
    bars = base.mark_rule().encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    layers = alt.layer(lines, bars, points, data=alt.Data(values=rows))
    panel = layers.properties(width=190, height=170)
    order = [f"{k} step{'s'[: k > 1]} at use" for k in STEPS]
    return panel.facet(
        column=alt.Column("k:N", sort=order, title=None),
        row=alt.Row("optima:N", title=None),
    )


# what theory alone says


def population(kappa: float, place: Callable[[float], float], agents: int = 400) -> Direction:
    """Curvatures log-uniform in 1/κ … 1, optima a function of them."""
    curvatures = [kappa ** ((i + 0.5) / agents - 1) for i in range(agents)]
    return Direction(curvatures, [place(c) for c in curvatures])


PLACES: dict[str, Callable[[float], float]] = {
    "x = 1/√λ": lambda c: c**-0.5,
    "x = ln λ": math.log,
    "x = √λ": math.sqrt,
    "x = λ": lambda c: c,
}


def theory_table() -> Iterator[str]:
    """Ratios to ν = k at k = 10 where optima are a function of curvature: no noise."""
    alphas = (0.3, 0.5, 0.9)
    yield "| optima | κ | " + " | ".join(f"αλ_max = {a}" for a in alphas) + " |"
    yield "|---|---:|" + "---:|" * len(alphas)
    for name, place in PLACES.items():
        for kappa in (4, 30, 100):
            agents, cells = population(kappa, place), []
            for alpha in alphas:
                one = agents.gap(Weighting(1, alpha), 10, alpha)
                taus = [
                    agents.gap(Weighting(0, local_steps=t, beta=alpha), 10, alpha) for t in (5, 30)
                ]
                start = agents.loss(agents.stationary(Weighting(0)), 0, alpha)
                best = agents.loss(agents.stationary(Weighting(10, alpha)), 10, alpha) / start
                cells.append(
                    f"{one:.1f}; {min(taus):.1f} … {max(taus):.1f}; {100 * best:.2g} % → "
                    f"{100 * one * best:.2g} %"
                )
            yield f"| {name} | {kappa} | {' | '.join(cells)} |"


def extremes() -> dict[str, str]:
    """Numbers in the page's sentences, all from closed forms."""
    found = {}
    for alpha in (0.3, 0.5, 0.9):
        found[f"largest_{alpha}"] = f"{largest_gap(0.01, 1.0, 1, 10, alpha):.3g}"
    rng = np.random.default_rng(0)
    for kappa in (4.0, 100.0):
        for agents in (10, 40, 100):
            drawn: list[float] = []
            for _ in range(100):
                few = Direction((kappa ** rng.uniform(-1, 0, agents)).tolist(), [0.0] * agents)
                one, ten = (1 + 1 / few.effective_agents(Weighting(n, ALPHA)) for n in (1, 10))
                drawn.append(ten / one)
            found[f"noise_{kappa:.0f}_{agents}"] = f"{100 * (fmean(drawn) - 1):+.1f} %"
    found.update(few_agents(rng))
    return found


def few_agents(rng: np.random.Generator, draws: int = 300) -> dict[str, str]:
    """Newcomers whose curvature is above that of all ten training agents, sampled Hessians.

    Curvatures as estimated from n samples in one direction are λχ²_n/n. α is a fraction of the
    inverse of the largest estimate in training.
    """
    found = {}
    for edge in (0.5, 1.0, 1.5):
        for n in (10, 100):
            everybody, above = [], []
            for _ in range(draws):
                true = 100.0 ** rng.uniform(-1, 0, 10)
                own = (true * rng.chisquare(n, 10) / n).tolist()
                agents, alpha = Direction(own, (1 / np.sqrt(true)).tolist()), edge / max(own)
                models = [agents.stationary(Weighting(nu, alpha)) for nu in (1, 10)]
                new = 100.0 ** rng.uniform(-1, 0, 200)
                estimates = new * rng.chisquare(n, 200) / n
                left = new * (1 - alpha * estimates) ** 20
                losses = [left * (w - 1 / np.sqrt(new)) ** 2 for w in models]
                everybody.append(losses[1].mean() > losses[0].mean())
                higher = estimates > max(own)
                if higher.any():
                    above.append(losses[1][higher].mean() > losses[0][higher].mean())
            found[f"worse_{edge}_{n}"] = f"{100 * fmean(everybody):.0f} %"
            found[f"above_{edge}_{n}"] = f"{100 * fmean(above):.0f} %"
    return found


def slots() -> Callable[[str], str]:
    """The board's sentence for a line of the decision table; nothing is printed unmeasured."""
    sentences = json.loads(BOARD.read_text("utf-8")) if BOARD.exists() else {}
    return lambda name: sentences.get(name, "not measured yet")


def write(found: Mapping[str, Any], results: Path, page: Path) -> None:
    """The chart and the page."""
    drawn = results.with_suffix(".svg")
    styled = chart(found).configure_view(stroke="#cccccc").configure_axis(gridColor="#eeeeee")
    drawn.write_text(vl_convert.vegalite_to_svg(styled.to_json()), "utf-8")
    middle, most = largest_error(found)
    environment = Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, autoescape=False
    )
    text = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        measured_table="\n".join(measured_table(found)),
        theory_table="\n".join(theory_table()),
        number=extremes(),
        middle=f"{100 * middle:.1f} %",
        most=f"{100 * most:.0f} %",
        seeds=len({key.split("/")[2] for key in found}),
        trained=f"{len(found)} of {planned(Sizes())}",
        board=slots(),
        alpha=ALPHA,
    )
    page.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="train nothing")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text("utf-8")) if options.page else compute(RESULTS, Sizes())
    write(found, RESULTS, PAGE)
    print(PAGE)


if __name__ == "__main__":
    main()
