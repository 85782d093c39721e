"""The tables of runs as text, shared by the terminal and the page: results, agents, settings,
costs, and the sites of a federation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nufed.algorithms.protocol import Algorithm
from nufed.data import PARTITIONS, settings_taken
from nufed.evaluate import AgentScores
from nufed.evaluate.scores import FEW_AGENTS
from nufed.lab.analysis.comparison import Incomparable, compare
from nufed.lab.config import Config
from nufed.lab.config.schema import AT_SITES
from nufed.lab.runs import Estimate, Row, Run
from nufed.lab.runs.federation_records import TrafficLine
from nufed.lab.runs.finished_run import BASELINES
from nufed.lab.runs.results import Paired, deviations, over_samples as over_samples_of
from nufed.settings import Field, settings_of, text_of


def tuned_rows(config: Config) -> dict[str, str]:
    """Rows of the table of settings; none for a run that was not tuned."""
    tuned = config.tuned
    if tuned is None:
        return {}
    choices = [
        f"{name} {settings_text(settings)} ({tuned.trials.get(name, 0)} trials)"
        for name, settings in tuned.choices.items()
    ]
    rows = {
        "tuned": f"{'; '.join(choices)}. Every method had the same budget, {tuned.budget_text} "
        f"({tuned.sampler}, seed {tuned.seed}), scored on validation samples of {tuned.agents} "
        "agents"
    }
    changed = []
    for name, settings in tuned.choices.items():
        table = config.methods[name].settings if name in config.methods else {}
        now = {**config.method.settings, **table}
        changed += [f"{name}.{key}" for key, value in settings.items() if now.get(key) != value]
    if changed:
        rows["changed after tuning"] = ", ".join(changed)
    return rows


NOT_SENT = "not sent by the sites"


def costs_table(runs: Sequence[Run]) -> Table:
    """The cost of training and evaluating each method, per seed, and that of a newcomer."""
    headings = ["", "gradients", "HVPs", "MB up", "MB down", "gradients of evaluation", "seconds"]
    rows = []
    for run in runs:
        for name in run.methods:
            cost = run.costs(name)
            rows.append(
                [
                    label(run, name, runs),
                    f"{cost['gradients']:,.0f}",
                    f"{cost['hvps']:,.0f}",
                    f"{cost['bytes_up'] / 1e6:.2f}",
                    f"{cost['bytes_down'] / 1e6:.2f}",
                    _work(cost["evaluation_gradients"], cost["evaluation_hvps"]),
                    f"{cost['seconds']:.1f}",
                    _newcomer_cost(run, name),
                ]
            )
    return Table([*headings, "gradients of a newcomer"], rows)


def _newcomer_cost(run: Run, name: str) -> str:
    """The work to make a personal model, as agents without a state did, and to fine-tune it."""
    made = [
        (s.personal_gradients, s.personal_hvps)
        for t in run.methods[name].values()
        for s in t.scores
        if s.newcomer
    ]
    if not made:  # none was evaluated: all agents took part
        return "–"
    steps = " or ".join(map(str, run.config.steps_of(name)))
    return f"{_work(*np.mean(made, axis=0))} + {steps}"


def _work(gradients: float, hvps: float) -> str:
    """Gradients, and Hessian-vector products if there are any."""
    return f"{gradients:,.6g}" + (f" and {hvps:,.6g} HVPs" if hvps else "")


def methods_table(runs: Sequence[Run]) -> Table:
    """Every setting of every method, one column per method; the most common settings first."""
    columns: dict[str, dict[str, str]] = {}
    headings: dict[str, str] = {"algorithm": "algorithm"}
    for run in runs:
        for name, algorithm in run.config.algorithms().items():
            column = {"algorithm": type(algorithm).__name__}
            for field, value in _settings(algorithm):
                headings.setdefault(field.name, _heading(field))
                column[field.name] = text_of(field, value)
            further = algorithm.notes.settings(algorithm)
            columns[label(run, name, runs)] = column | {**further}
            headings |= {key: key for key in further if key not in headings}
    had = {key: sum(key in column for column in columns.values()) for key in headings}
    keys = sorted(headings, key=lambda key: -had[key])  # stable: ties in the order of fields
    rows = [[headings[k], *(column.get(k, "–") for column in columns.values())] for k in keys]
    return Table(["", *columns], rows, prose=True)


def _settings(algorithm: Algorithm) -> Iterator[tuple[Field, Any]]:
    """Its settings with their values, including those of base classes that it fixes."""
    fields = {
        field.name: field
        for cls in reversed(type(algorithm).__mro__)
        if dataclasses.is_dataclass(cls)
        for field in settings_of(cls)
    }
    return ((field, getattr(algorithm, name)) for name, field in fields.items())


def _heading(field: Field) -> str:
    """The name of a setting, with the paper's letter if its description begins with one."""
    letter, comma, _ = field.setting.about.partition(",")
    return f"{field.name} ({letter})" if comma and len(letter) <= 3 else field.name


def settings_table(run: Run) -> Table:
    """The settings that all methods of a run share, with the paper's letters."""
    config = run.config
    cohort = max(1, round(config.participation * (run.agents - run.unseen)))
    rows = {
        "agents (N)": f"{run.agents}, of which {run.unseen} unseen in training{_names(run)}",
        "participation (r)": f"{config.participation:g}, a cohort of {cohort} agents a round",
        "rounds (K)": run.rounds_text,
        "data": f"{config.data.source}; {_partition(run)}",
        "samples per agent": samples_per_agent(run)
        + " of training and test" * _without_validation(run),
        **_columns(run),
        "parts": f"validation {config.data.validation:g}, test {config.data.test:g}, rest training",
        "model": _model(config),
        "fine-tuning steps": steps_shown(run),
        "step size of fine-tuning": "chosen on validation samples, one per method, seed and "
        "number of steps"
        if run.step_sizes_chosen
        else "as trained",
        "scored on": f"the agents' {config.eval_on} parts",
        "agents evaluated": "all" if config.eval_agents is None else evaluated_agents(run),
        "engine": ", ".join(f"{method} {engine}" for method, engine in run.engines.items()),
        "seeds": ", ".join(map(str, config.seeds)),
        "split SHA-256": ", ".join(
            f"{s}: {x.sha256[:12] or 'at the sites'}" for s, x in run.splits.items()
        ),
        "software": ", ".join(f"{k} {v}" for k, v in run.software.items()),
        **_privacy(run),
        **tuned_rows(config),
    }
    return Table(["", ""], [[k, v] for k, v in rows.items()], prose=True)


def _model(config: Config) -> str:
    """The model with its arguments, and in which numbers and layout it is computed."""
    name, arguments = config.model.name, config.model.args
    parts = [f"{name} {arguments}" if arguments else name, config.dtype]
    if config.precision != "float32":
        parts.append(f"products in {config.precision}")
    if config.memory_format != "contiguous":
        parts.append(config.memory_format)
    return ", ".join(parts)


def problem_text(run: Run) -> str:
    """The data and its split, as resolved, in a sentence."""
    config = run.config.data
    unseen = f", {run.unseen} of them unseen in training{_names(run)}" if run.unseen else ""
    source = "" if config.source == AT_SITES else f"{config.source}, {_partition(run)}: "
    sizes = samples_per_agent(run)
    kind = "training and test samples" if _without_validation(run) else "samples"
    each = "" if sizes == NOT_SENT else f", {sizes} {kind} each"
    return f"Data: {source}{run.agents} agents{unseen}{each}."


def _columns(run: Run) -> dict[str, str]:
    """How the raw columns of a table became inputs, if the data is one."""
    preparation = run.preparation(run.config.seeds[0])
    if preparation is None:
        return {}
    how = "as configured" if run.config.data.prepare.given else "learned from training parts"
    unused = [column.name for column in preparation.columns if column.empty]
    without = f"; without a value in training: {', '.join(unused)}" if unused else ""
    return {"columns": f"{preparation}, {how}{without}"}


def _names(run: Run) -> str:
    """The agents held out from training, in brackets, if they are few."""
    return f" ({', '.join(run.unseen_names)})" if run.unseen_names else ""


def samples_per_agent(run: Run) -> str:
    """The number of samples of an agent, all parts: one number, or minimum, median and maximum."""
    listed = [agent for split in run.splits.values() for agent in split.agents]
    sizes = [agent.train + agent.validation + agent.test for agent in listed]
    if run.federated:  # sites that sent no scores have not reported their number
        sizes = [size for size in sizes if size]
    if not sizes:
        return NOT_SENT
    low, middle, high = min(sizes), float(np.median(sizes)), max(sizes)
    same = f"{low:,}"
    return same if low == high else f"{same} to {high:,} (median {middle:,g})"


def _without_validation(run: Run) -> bool:
    """Whether numbers of samples leave out validation parts, whose sizes sites do not send."""
    return run.federated and bool(run.config.data.validation) and samples_per_agent(run) != NOT_SENT


def _partition(run: Run) -> str:
    """The partition with its settings, as resolved, the shift and the augmentation."""
    config = run.config.data
    name = run.partition
    known = PARTITIONS.working().get(name)
    taken = {} if known is None else settings_taken(known, config.partition_settings)
    names = {"concentration": "α_d (dirichlet)"}
    words = [name, *(f"{names.get(k, k)} = {v:g}" for k, v in taken.items())]
    if name != config.partition:
        words[0] += f" (by {config.partition!r})" if config.split_file is None else ""
    if name == "dirichlet":
        words.append(f"reuse {config.reuse}")
    text = ", ".join(words)
    if config.partition_args:
        text += f" {config.partition_args}"
    if config.shift != "none":
        text += f"; shift {config.shift} {config.shift_args or ''}".rstrip()
    if config.augment != "none":
        text += f"; training batches augmented by {config.augment}"
    return text


def _privacy(run: Run) -> dict[str, str]:
    """Clipping and noise of updates, and the guarantees that they give."""
    about = run.privacy()
    if about is None:
        return {}
    rows = {
        "privacy": f"updates clipped to norm {about.clip:g}, noise multiplier "
        f"{about.noise:g}, delta (δ) {about.delta:g}; {about.rounds} rounds with "
        f"{about.cohort} of {about.agents} agents",
    }
    spent, budgets, holds = about.epsilon, about.budget, about.holds_for
    for what, epsilon, budget, for_whom in (
        ("the released model", spent.released, budgets.released, holds.released),
        ("a site against the server", spent.server, budgets.server, holds.server),
    ):
        most = "" if budget is None else f", budget {budget:g}"
        rows[f"epsilon (ε) of {what}"] = f"{epsilon:.4g}{most}: for {for_whom}"
    if about.updates and about.updates.claimed > about.updates.charged:
        rows["noisy updates of a site"] = (
            f"at most {about.updates.charged}; one site claims {about.updates.claimed}, more than "
            "it was sent requests: ε does not count them"
        )
    return rows


MAX_ROUNDS, MAX_SITES = 100, 20  # in the table by round; traffic.jsonl has all


def sites_table(run: Run) -> Table | None:
    """What each site answered, how long it took, and its bytes; None if that is not recorded."""
    lines = run.traffic()
    if not lines:
        return None
    seed = run.config.seeds[0]
    rows = []
    for agent in sorted({line.agent for line in lines}):
        requests = [line for line in lines if line.agent == agent]
        answered = [line for line in requests if line.bytes_up]
        trained = [line.seconds for line in answered if line.phase == "train"]
        rows.append(
            [
                run.site_name(seed, agent) or str(agent),
                f"{len(answered)} of {len(requests)}",
                f"{sum(trained) / len(trained):.1f}" if trained else "–",
                f"{max(trained):.1f}" if trained else "–",
                f"{sum(line.bytes_down for line in requests) / 1e6:.3f}",
                f"{sum(line.bytes_up for line in requests) / 1e6:.3f}",
            ]
        )
    headings = ["", "answered", "seconds to train, mean", "longest", "MB down", "MB up"]
    return Table(headings, rows)


def rounds_table(run: Run) -> Table | None:
    """Seconds and kilobytes of every site in the last rounds; None if that is not recorded."""
    lines = run.traffic()
    if not lines:
        return None
    seed = run.config.seeds[0]
    agents = sorted({line.agent for line in lines})[:MAX_SITES]
    cells: dict[tuple[int, int], list[TrafficLine]] = {}
    for line in lines:
        cells.setdefault((line.round, line.agent), []).append(line)
    rounds = sorted({line.round for line in lines})[-MAX_ROUNDS:]
    rows = [[str(k), *(_cell(cells.get((k, agent), ())) for agent in agents)] for k in rounds]
    names = [run.site_name(seed, agent) or str(agent) for agent in agents]
    return Table(["round", *names], rows)


def _cell(lines: Sequence[TrafficLine]) -> str:
    """Seconds and bytes of all requests of a round, including repeated attempts."""
    if not lines:
        return "–"
    seconds = sum(line.seconds for line in lines)
    down, up = (sum(getattr(line, key) for line in lines) for key in ("bytes_down", "bytes_up"))
    return f"{seconds:.1f} s, {down / 1e3:.1f} ↓ {up / 1e3:.1f} ↑"


MAX_LISTED = 100  # agents shown individually
MAX_CLASSES = 10  # whose counts are shown by agent


@dataclass(frozen=True)
class Table:
    """Headings and rows of text.

    Rows whose number is in ``quiet`` (such as baselines) are shown in grey. Where not all columns
    fit, those in ``optional`` are omitted, in this order. Cells of ``prose`` are broken into lines.
    """

    headings: list[str]
    rows: list[list[str]]
    quiet: Collection[int] = ()
    optional: tuple[str, ...] = ()
    prose: bool = False


def number_format(run: Run) -> Callable[[float], str]:
    """Formats accuracies as percentages, other scores as numbers."""
    if run.measure.name == "accuracy":
        return lambda value: f"{100 * value:.1f} %"
    return lambda value: f"{value:.3g}" if math.isfinite(value) else "diverged"


def difference_format(run: Run) -> Callable[[Paired], str]:
    """Formats a paired difference of scores with its half-width, after a slash that over samples;
    accuracies in percentage points."""
    percent = run.measure.name == "accuracy"

    def show(value: float) -> str:
        return f"{100 * value:.1f}" if percent else f"{value:.3g}"

    def both(pair: Paired) -> str:
        mean, half = pair.mean, pair.half_width
        if not math.isfinite(mean):
            return "–"
        if mean == half == 0 and not pair.over_samples:
            return "equal"  # on every agent
        size = show(abs(mean))
        signed = size if float(size) == 0 else ("+" if mean > 0 else "−") + size
        if pair.over_samples is not None:
            return f"{signed} ± {'–' if half is None else show(half)} / {show(pair.over_samples)}"
        return f"{signed} (too few)" if half is None else f"{signed} ± {show(half)}"

    return both


def listed(words: Sequence[object]) -> str:
    """The words with commas and a last “and”."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def label(run: Run, name: str, runs: Sequence[Run]) -> str:
    """The name of a method, with its run's name where several runs are shown."""
    return name if len(runs) == 1 else f"{run_name(run, runs)}: {name}"


def run_name(run: Run, runs: Sequence[Run]) -> str:
    """The name of a run's directory, with its number if several have the same name."""
    same = [other.path.name for other in runs].count(run.path.name) > 1
    return f"{runs.index(run) + 1} {run.path.name}" if same else run.path.name


def all_groups(runs: Sequence[Run]) -> list[str]:
    """The groups of agents that any of the runs has scores for."""
    return max((run.groups for run in runs if run.rows()), key=len, default=[])


def results_table(runs: Sequence[Run], group: str, *, short: bool = False) -> Table:
    """Methods and null baselines on the agents of one group, after the last round.

    ``short`` has only the scores and the paired differences to local training and to the best
    method.
    """
    chosen = any(run.step_sizes_chosen for run in runs)
    accuracy = all(run.measure.name == "accuracy" for run in runs)
    columns = [
        name
        for name in (_SHORT if short else _COLUMNS)
        if (name not in _STEP_SIZES or chosen) and (name not in _BY_CLASS or accuracy)
    ]
    if not over_samples(runs):
        columns.remove("± samples")
    if not any("local" in run.baselines for run in runs):
        columns.remove("− local")
    if all(sum(row.kind == "method" for row in run.rows()) < 2 for run in runs):
        columns.remove("− best")
    rows: list[list[str]] = []
    quiet = set()
    for run in runs:
        show, pairs = number_format(run), _pairs(run, group)
        for row in run.rows():
            if row.group == group:
                cells = [
                    pairs.get((row.name, name), "–")
                    if name in _PAIRED
                    else _COLUMNS[name](row, show)
                    for name in columns
                ]
                if row.kind == "baseline":
                    quiet.add(len(rows))
                rows.append([label(run, row.name, runs), *cells])
    return Table(["", *columns], rows, quiet, _OPTIONAL)


def _pairs(run: Run, group: str) -> dict[tuple[str, str], str]:
    """The paired differences of a group by row and column."""
    show, texts = difference_format(run), {}
    for pair in run.paired():
        if pair.group == group:
            column = {"local": "− local", "majority": "", "centroid": "", "untrained": ""}.get(
                pair.against, "− best"
            )
            texts[pair.name, column] = show(pair)
    return texts


INCOMPARABLE: dict[Incomparable, str] = {
    "data": "since their data differ",
    "at_sites": "since the splits of a federation stay at its sites",
    "splits": "since their splits differ",
    "seeds": "since they have no seed in common",
}


def between_runs(runs: Sequence[Run], group: str) -> tuple[Table, list[str]]:
    """Paired differences of the methods of each further run to the first, and why some have none.

    The reasons are given once, with the agents seen in training.
    """
    rows, reasons = [], []
    show, verdicts = difference_format(runs[0]), {"undecided": "can't be told apart"}
    for each in compare(runs, group):
        both = f"{run_name(each.run, runs)} − {run_name(runs[0], runs)}"
        if each.incomparable is not None and group == "seen":
            reasons.append(f"{both}: no paired differences, {INCOMPARABLE[each.incomparable]}")
        for pair in each.pairs:
            name = " − ".join(dict.fromkeys((pair.name, pair.against)))
            verdict = verdicts.get(pair.verdict, pair.verdict)
            rows.append([f"{both}: {name}", show(pair), verdict])
    return Table(["", "difference", ""], rows), reasons


def _signed(show: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: ("+" if value >= 0 else "−") + show(abs(value))


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "–" if value is None or math.isnan(value) else show(value)


# paired differences are not properties of a row: results_table fills them in
_COLUMNS: dict[str, Callable[[Row, Callable[[float], str]], str]] = {
    "global": lambda row, show: _or_dash(row.shared.mean, show),
    "personal": lambda row, show: show(row.personal.mean),
    "± 95 %": lambda row, show: _half_width(row.personal, show),
    "± samples": lambda row, show: _or_dash(row.over_samples, show),
    "− local": lambda row, show: "–",
    "− best": lambda row, show: "–",
    "as trained": lambda row, show: show(row.as_trained.mean) if row.lr_scale else "–",
    "α": lambda row, show: _chosen_lr(row),
    "std": lambda row, show: show(row.std),
    "worst 10 %": lambda row, show: show(row.worst_tenth),
    "harmed": lambda row, show: _or_dash(row.harmed, lambda share: f"{100 * share:.0f} %"),
    "over majority": lambda row, show: _or_dash(row.above_majority.mean, _signed(show)),
    "balanced": lambda row, show: _or_dash(row.balanced.mean, show),
    "minority": lambda row, show: _or_dash(row.minority.mean, show),
}
_BY_CLASS = ("over majority", "balanced", "minority")
_STEP_SIZES = ("as trained", "α")
_PAIRED = ("− local", "− best")
_SHORT = ("personal", "± 95 %", "± samples", *_PAIRED, "global")
_OPTIONAL = ("std", "over majority", "minority", "balanced", "as trained", "α", "harmed",
             "worst 10 %", "− best", "± 95 %", "± samples", "global")  # fmt: skip


def over_samples(runs: Sequence[Run]) -> bool:
    """Whether any of the runs has intervals over samples."""
    return any(row.over_samples is not None for run in runs for row in run.rows())


def _chosen_lr(row: Row) -> str:
    """The chosen step size, or its range over seeds; for learned step sizes their multiplier.

    For local training it is that of training, since it is not fine-tuned.
    """
    values = [lr for lr in row.adapt_lr if lr is not None]
    times = "" if values else "×"
    shown = sorted(
        {f"{times}{value:.2g}": value for value in values or row.lr_scale}.items(),
        key=lambda item: item[1],
    )
    texts = [text for text, _ in shown]
    return texts[0] if len(texts) == 1 else f"{texts[0]}–{texts[-1]}" if texts else "–"


def _half_width(estimate: Estimate, show: Callable[[float], str]) -> str:
    return "too few" if estimate.half_width is None else show(estimate.half_width)


def agents_table(run: Run) -> Table:
    """Individual agents' scores, first seed: the model of local training, and by method the global
    and the personal model.

    With few agents also their numbers of samples by class, and intervals over samples.
    """
    show, seed = number_format(run), run.config.seeds[0]
    lines = [line for line in run.lines() if line.name == "local" and line.kind == "baseline"]
    lines += [line for line in run.lines() if line.kind == "method" and seed in line.seeds]
    few, split = run.agents <= FEW_AGENTS, run.splits[seed]
    classes = split.classes if few and len(split.classes) <= MAX_CLASSES else []
    headings = ["", "training samples", "test samples", *(f"of class {name}" for name in classes)]
    rows: dict[int, list[str]] = {}
    for line in lines:
        is_method = line.kind == "method"
        about = len(headings)
        headings += [f"{line.label}: global", "personal"] if is_method else [line.label]
        for s in line.seeds[seed].final[:MAX_LISTED]:
            counts = [f"{count:,}" for count in split.agents[s.agent].counts] if classes else []
            name = s.name if s.seen else f"{s.name}, unseen"
            first = [name, f"{s.train_samples:,}", f"{s.test_samples:,}", *counts]
            row = rows.setdefault(s.agent, first)
            row += ["–"] * (about - len(row))
            if is_method:
                row.append("–" if s.global_score is None else show(s.global_score))
            row.append(
                show(s.score[line.steps]) + (_of_samples(s, line.steps, show) if few else "")
            )
    for row in rows.values():
        row += ["–"] * (len(headings) - len(row))
    return Table(headings, [rows[agent] for agent in sorted(rows)])


def _of_samples(scores: AgentScores, steps: int, show: Callable[[float], str]) -> str:
    """The half-width of an agent's interval over its samples, as text.

    Where all samples are right, or all wrong, resamples do not differ: three of n samples could
    still be otherwise (the rule of three).
    """
    width = over_samples_of([deviations([scores], steps)])
    if not width and scores.balanced and scores.score[steps] in (0, 1):
        width = min(1.0, 3 / scores.test_samples)
    return "" if width is None else f" ± {show(width)}"


def steps_shown(run: Run) -> str:
    """The fine-tuning steps after which results are shown, as text."""
    shown = run.config.steps_shown
    by_method = {name: run.config.steps_of(name) for name in run.methods}
    others = [f"; {n} {' and '.join(map(str, s))}" for n, s in by_method.items() if s != [shown]]
    return f"{shown}{''.join(others)}"


def evaluated_agents(run: Run) -> str:
    """The number of agents seen in training that are evaluated, or sites that answered, as text."""
    seen = run.agents - run.unseen
    limit = run.config.eval_agents
    if run.federated:
        (part,) = next(iter(run.methods.values())).values()
        answered = sum(scores.seen for scores in part.final)
        return f"the {answered} sites that answered, of {seen}"
    if limit is None or limit >= seen:
        return f"the {seen} agents"
    return f"a fixed sample of {limit} of {seen} agents"


def newcomer_notes(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What an agent unseen in training does, with the methods of which that is so."""
    methods: dict[str, list[str]] = {}
    for run in runs:
        for name, algorithm in run.config.algorithms().items():
            if name in run.methods:
                methods.setdefault(algorithm.notes.newcomer, []).append(label(run, name, runs))
    return [(", ".join(names), what) for what, names in methods.items()]


def without_global(runs: Sequence[Run]) -> list[str]:
    """The methods whose server holds no complete model."""
    return [
        label(run, name, runs)
        for run in runs
        for name, part in run.methods.items()
        if any(s.global_score is None for t in part.values() for s in t.final)
    ]


def baseline_notes(run: Run) -> list[tuple[str, str]]:
    """The description of each null baseline of a run."""
    return [(name, BASELINES[name]) for name in run.baselines]


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as key = value."""
    texts = [f"{key} = {setting_text(value)}" for key, value in settings.items()]
    return ", ".join(texts) or "as configured"


def setting_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
