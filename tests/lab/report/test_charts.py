"""Charts plot exactly the numbers in the run's files."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import nufed as library
from nufed.lab.analysis.comparison import one_differing_key, value_of
from nufed.lab.config import load_config
from nufed.lab.files import read_sealed
from nufed.lab.report import figures, page
from nufed.lab.report.charts import all_charts, signal_chart
from nufed.lab.report.run_page import build_report
from nufed.lab.report.style import GREY, Look, Styles, spread_labels
from nufed.lab.runs import load_run
from support import json_lines, with_figures

STEP_SIZES = {"meta_lr": 0.001, "adapt_lr": 0.01}
CONFIG = {
    "name": "charts",
    "rounds": 3,
    "workers": 1,
    "seeds": [0, 1],
    "eval_every": 1,
    "data": {"agents": 5, "samples_per_agent": 40, "unseen_agents": 2, "validation": 0.2},
    "model": {"args": {"hidden": [4], "activation": "tanh"}},
    "method": {"adapt_steps": 2, "batch_size": 5, **STEP_SIZES},
    "methods": {
        "fedavg": {"algorithm": "fedavg"},
        "fo": {"algorithm": "gmeta", "curvature": "first_order", "eval_steps": [1, 2]},
    },
}
SHOWN = {  # what is shown: method and fine-tuning steps
    "fedavg": ("fedavg", 2),
    "fo after 1 step": ("fo", 1),
    "fo after 2 steps": ("fo", 2),
}
NULLS = {"majority": 2, "local": 0, "untrained": 2}  # baselines and the steps they are shown after


@pytest.fixture(scope="module")
def drawn():
    """Collects the specifications of all charts instead of drawing them."""
    specs = {}

    def draw(given, *, javascript=False):
        specs.update(json.loads(json.dumps(given)))
        return figures.Drawn(javascript="//" if javascript else None)

    with with_figures(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw", draw)
        patch.setattr(page, "draw", draw)
        yield specs


@pytest.fixture(scope="module")
def run(tmp_path_factory, drawn):
    """The directory of a run with its report."""
    return library.run(CONFIG, out=tmp_path_factory.mktemp("runs") / "run").path


def points(spec, mark, *channels):
    """The values that all marks of a kind plot, by channel."""
    found = []
    for layer in spec.get("layer", [spec]):
        dash = {(): "", (5, 4): "dashed ", (2, 3): "dotted "}
        kind = dash[tuple(layer["mark"].get("strokeDash", ()))] + layer["mark"]["type"]
        if kind == mark:
            rows = spec["datasets"][layer.get("data", spec.get("data"))["name"]]
            fields = [layer["encoding"][channel]["field"] for channel in channels]
            found += [tuple(row[field] for field in fields) for row in rows]
    return found


def agents_of(part, seed):
    """The final scores of every agent, with the step size that results show."""
    chosen = part / f"seed-{seed}" / "agents-chosen.jsonl"
    return json_lines(chosen if chosen.exists() else part / f"seed-{seed}" / "agents.jsonl")


def scores(part, seed, steps, seen=True):
    return [agent["score"][steps] for agent in agents_of(part, seed) if agent["seen"] == seen]


def results(run, group):
    rows = json.loads((run / "results.json").read_text())["rows"]
    return {row["name"]: row for row in rows if row["group"] == group}


def close(found, wanted):
    """The same points: equal keys, and numbers equal to rounding."""
    found, wanted = sorted(found), sorted(wanted)
    assert [p[:2] for p in found] == [p[:2] for p in wanted]
    assert np.allclose([p[2:] for p in found], [p[2:] for p in wanted], rtol=1e-12, atol=1e-12)


def test_the_page_embeds_what_is_drawn(run, drawn):
    text = (run / "report.html").read_text("utf-8")
    embedded = json.loads(re.search(r"^const specs = (.*);$", text, re.MULTILINE)[1])
    groups = {f"{kind}-{group}" for kind in ("results", "rounds") for group in ("seen", "unseen")}
    assert embedded.keys() == {
        *groups,
        "training-loss",
        "training-update",
        "steps",
        "agents",
        "split",
    }
    assert embedded == {name: drawn[name] for name in embedded}


@pytest.mark.parametrize("group", ["seen", "unseen"])
def test_the_first_chart_shows_the_results(run, drawn, group):
    spec, table = drawn[f"results-{group}"], results(run, group)
    own = {name: row for name, row in table.items() if row["kind"] == "method"}
    open_points = [(name, row["global"]["mean"]) for name, row in own.items()]
    filled = [(name, row["personal"]["mean"]) for name, row in table.items()]
    assert points(spec, "point", "y", "x") == [*open_points, *filled] and len(own) == 3
    bars = [(name, row["personal"]) for name, row in table.items()]
    ends = [
        (name, max(0, p["mean"] - p["half_width"]), min(1, p["mean"] + p["half_width"]))
        for name, p in bars
        if p["half_width"] is not None
    ]
    assert points(spec, "rule", "y", "x", "x2") == ends and ends


@pytest.mark.parametrize("group", ["seen", "unseen"])
def test_scores_by_round(run, drawn, group):
    wanted = []
    for label, (method, steps) in SHOWN.items():
        seeds = [json_lines(run / f"methods/{method}/seed-{s}/metrics.jsonl") for s in (0, 1)]
        for round, lines in enumerate(zip(*seeds, strict=True)):
            values = [line["evaluation"][group]["score"][steps] for line in lines]
            wanted.append((label, round, np.mean(values), min(values), max(values)))
    spec = drawn[f"rounds-{group}"]
    assert len(wanted) == 3 * (CONFIG["rounds"] + 1)
    close(points(spec, "line", "color", "x", "y"), [point[:3] for point in wanted])
    close(points(spec, "point", "color", "x", "y"), [point[:3] for point in wanted])
    close(points(spec, "area", "color", "x", "y", "y2"), [(*p[:2], *p[3:]) for p in wanted])
    table = results(run, group)
    last = {name: y for name, x, y in points(spec, "line", "color", "x", "y") if x == 3}
    assert last == pytest.approx({name: table[name]["as_trained"]["mean"] for name in SHOWN})
    dotted = points(spec, "dotted line", "color", "x", "y")
    wanted = []  # one for each method, whatever the number of its lines
    for method, label in {"fedavg": "fedavg", "fo": "fo after 1 step"}.items():
        seeds = [json_lines(run / f"methods/{method}/seed-{s}/metrics.jsonl") for s in (0, 1)]
        for round, lines in enumerate(zip(*seeds, strict=True)):
            own = [line["evaluation"][group]["global_score"] for line in lines]
            wanted.append((label, round, np.mean(own)))
        assert wanted[-1][2] == pytest.approx(table[label]["global"]["mean"])
    close(dotted, wanted)
    level = [(name, x, table[name]["personal"]["mean"]) for name in NULLS for x in (0, 3)]
    close(points(spec, "dashed line", "detail", "x", "y"), level)
    assert {name for (name,) in points(spec, "text", "text")} == set(NULLS)


@pytest.mark.parametrize(
    ("name", "key"), [("training-loss", "training_loss"), ("training-update", "update_norm")]
)
def test_training_by_round(run, drawn, name, key):
    wanted = []
    for method in CONFIG["methods"]:
        seeds = [json_lines(run / f"methods/{method}/seed-{s}/metrics.jsonl") for s in (0, 1)]
        for lines in zip(*seeds, strict=True):
            if key in lines[0]:
                values = [line[key] for line in lines]
                ends = (np.mean(values), min(values), max(values))
                wanted.append((method, lines[0]["round"], *ends))
    assert len(wanted) >= 2 * CONFIG["rounds"]
    spec = drawn[name]
    close(points(spec, "line", "color", "x", "y"), [point[:3] for point in wanted])
    close(points(spec, "area", "color", "x", "y", "y2"), [(*p[:2], *p[3:]) for p in wanted])
    axes = [layer["encoding"]["x"]["axis"] for layer in spec["layer"]]
    rounds = sorted({point[1] for point in wanted})
    assert {tuple(axis["values"]) for axis in axes} == {tuple(rounds)}  # and none in between


def test_jumps_of_training_are_flagged(run):
    loaded = load_run(run)
    trained = loaded.methods["fo"][1]
    norms = [1.0, 0.9, 1.1, 1.0, 0.9, 0.8, 9.0, 0.9]
    metrics = [
        trained.metrics[1].model_copy(update={"round": k, "update_norm": norm})
        for k, norm in enumerate(norms)
    ]
    parts = {0: loaded.methods["fo"][0], 1: replace(trained, metrics=metrics)}
    changed = replace(loaded, methods={**loaded.methods, "fo": parts})
    spec = signal_chart(changed, "update_norm", "norm", Look.of([changed])).to_dict()
    assert points(spec, "circle", "x", "y") == [(6, 9.0)]


def test_scores_by_steps(run, drawn):
    wanted = []
    for method in CONFIG["methods"]:
        for steps in range(3):
            values = [np.mean(scores(run / "methods" / method, s, steps)) for s in (0, 1)]
            wanted.append((method, steps, np.mean(values), min(values), max(values)))
    spec = drawn["steps"]
    close(points(spec, "line", "color", "x", "y"), [point[:3] for point in wanted])
    close(points(spec, "area", "color", "x", "y", "y2"), [(*p[:2], *p[3:]) for p in wanted])
    table = results(run, "seen")
    at = {(name, x): y for name, x, y in points(spec, "line", "color", "x", "y")}
    for label, (method, steps) in SHOWN.items():
        assert at[method, steps] == pytest.approx(table[label]["personal"]["mean"])
        assert at[method, 0] == pytest.approx(table[label]["global"]["mean"])
    nulls = [
        (name, k, np.mean([scores(run / "baselines" / name, s, k) for s in (0, 1)]))
        for name in NULLS
        for k in range(3)
    ]
    close(points(spec, "dashed line", "detail", "x", "y"), nulls)


def test_scores_of_single_agents(run, drawn):
    parts = {label: (run / "methods" / method, k) for label, (method, k) in SHOWN.items()}
    parts |= {name: (run / "baselines" / name, k) for name, k in NULLS.items()}
    wanted = [(n, x) for n, (part, k) in parts.items() for s in (0, 1) for x in scores(part, s, k)]
    found = points(drawn["agents"], "boxplot", "y", "x")
    assert Counter(found) == Counter(wanted) and len(found) == 6 * 2 * 3
    single = points(drawn["agents"], "circle", "y", "x")
    assert single == found  # hovering shows each
    (layer,) = [x for x in drawn["agents"]["layer"] if x["mark"]["type"] == "circle"]
    rows = drawn["agents"]["datasets"][drawn["agents"].get("data", layer.get("data"))["name"]]
    by_agent = {(r["method"], r["seed"], r["agent"]): r["score"] for r in rows}
    for label, (part, steps) in parts.items():
        for seed in (0, 1):
            for agent in agents_of(part, seed):
                if agent["seen"]:
                    assert by_agent[label, seed, agent["name"]] == agent["score"][steps]
    assert {t["field"] for t in layer["encoding"]["tooltip"]} >= {"agent", "score", "method"}
    for name, row in results(run, "seen").items():
        assert np.mean([x for n, x in found if n == name]) == pytest.approx(row["personal"]["mean"])


def test_samples_per_agent_and_class(run, drawn):
    split = read_sealed(run / "splits/seed-0.json").about
    wanted = {
        (agent["name"], name, count)
        for agent in split["agents"]
        for name, count in zip(split["classes"], agent["counts"], strict=True)
    }
    found = points(drawn["split"], "rect", "x", "y", "color")
    assert set(found) == wanted and len(found) == len(wanted) == 5 * 10
    assert sum(count for *_, count in found) == 5 * 40


@pytest.fixture(scope="module")
def compared(run, drawn, tmp_path_factory):
    """Another run with the methods in another order, and the charts of both on one page."""
    data = {**CONFIG["data"], "dirichlet": 1.0}
    methods = dict(reversed(CONFIG["methods"].items()))
    where = tmp_path_factory.mktemp("runs") / "other"
    other = library.run({**CONFIG, "data": data, "methods": methods}, out=where).path
    both = [load_run(path) for path in (run, other)]
    drawn.clear()
    build_report(both, where.parent / "both")
    return both, dict(drawn)


def test_runs_that_differ_by_one_key_are_plotted_over_it(compared):
    runs, specs = compared
    spec = specs["by-key-seen"]
    wanted = [
        (row.name, run.config.data.dirichlet, row.personal.mean)
        for run in runs
        for row in run.rows()
        if row.group == "seen" and row.kind == "method"
    ]
    assert points(spec, "line", "color", "x", "y") == wanted and {x for _, x, _ in wanted} == {
        0.01,
        1,
    }
    assert {name for name, _ in points(spec, "dashed line", "detail", "x")} == set(NULLS)


def test_a_method_looks_the_same_in_both_runs(compared):
    runs, specs = compared
    assert list(runs[0].methods) == list(reversed(runs[1].methods))
    for kind in ("results-seen", "rounds-seen", "steps", "agents"):
        looks = []
        for number in (1, 2):
            spec = specs[f"{kind}-{number}"]
            look = {}
            for layer in spec["layer"]:
                for channel in ("color", "shape"):
                    scale = layer["encoding"].get(channel, {}).get("scale", {"domain": []})
                    pairs = zip(scale["domain"], scale.get("range", ()), strict=True)
                    look |= {(channel, name): value for name, value in pairs}
            looks.append(look)
        assert looks[0] == looks[1] and looks[0], kind
        domains = [specs[f"{kind}-{n}"]["layer"][-1]["encoding"] for n in (1, 2)]
        axis = "x" if kind in ("results-seen", "agents") else "y"
        assert domains[0][axis]["scale"] == domains[1][axis]["scale"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rounds": 5, "name": "x", "workers": 2}, "rounds"),
        ({"rounds": 5, "participation": 0.5}, ""),
        ({"workers": 2}, ""),
        ({"method": {"adapt_steps": 1, "batch_size": 5, **STEP_SIZES}}, "method.adapt_steps"),
        ({"methods": {"fedavg": {}, "fo": CONFIG["methods"]["fo"]}}, ""),
    ],
)
def test_the_key_by_which_runs_differ(run, changes, key):
    loaded = load_run(run)
    other = load_config({**CONFIG, **changes}).written_out()
    found = one_differing_key([loaded, replace(loaded, config=other)])
    assert found == key
    if key:
        assert value_of(replace(loaded, config=other), key) == (5 if key == "rounds" else 1)


def test_bounds(run, drawn, nufed):
    printed = json.loads(nufed("bounds", run, "--report", "--json", cwd=run).stdout)
    promised = [row["promised"] for row in printed["methods"]]
    terms = [list(own["terms"].values()) for own in promised]
    found = points(drawn["bounds-terms"], "bar", "y", "color", "x")
    assert len({term for _, term, _ in found}) == 6
    by_method = [[x for name, _, x in found if name == m] for m in CONFIG["methods"]]
    assert by_method == terms
    assert [sum(own) for own in by_method] == pytest.approx([own["total"] for own in promised])
    measured = [(r["method"], r["round"], r["value"]) for r in printed["stationarity"]]
    found = points(drawn["bounds-stationarity"], "line", "color", "x", "y")
    assert sorted(found) == sorted(measured) and {x for _, x, _ in found} == {0, 3}


def test_advice(run, drawn, nufed):
    assert nufed("advise", run, "--max-steps", 2, cwd=run).returncode == 0
    advice = json.loads((run / "advice.json").read_text())
    best = advice["recommended"]
    trained = [curve for curve in advice["curves"] if curve["times"] == 1]
    wanted = [(c["method"], p["steps"], p["mean"]) for c in trained for p in c["points"]]
    spec = drawn["advice"]
    assert points(spec, "line", "color", "x", "y") == wanted and len(wanted) == 6
    (curve,) = [
        c for c in advice["curves"] if (c["method"], c["times"]) == (best["method"], best["times"])
    ]
    spread = [(p["steps"], p["low"], p["high"]) for p in curve["points"]]
    assert points(spec, "area", "x", "y", "y2") == spread
    chosen = (best["steps"], curve["points"][best["steps"]]["mean"])
    assert points(spec, "point", "x", "y") == [*(p[1:] for p in wanted), chosen]
    level = [(steps, advice["majority"]) for steps in (0, 2)]
    assert points(spec, "dashed line", "x", "y") == level


def diverged(run, value, method="fo"):
    """The run as if one method had this loss on every agent, after training."""
    parts = {}
    for seed, trained in run.methods[method].items():
        metrics = [*trained.metrics]
        last = metrics[-1].model_copy(deep=True)
        last.evaluation["seen"].score[:] = [value] * 3
        own = [replace(s, score=(value,) * 3) for s in trained.final]
        parts[seed] = replace(trained, metrics=[*metrics[:-1], last], scores=own, chosen=None)
    return replace(run, methods={**run.methods, method: parts})


@pytest.mark.parametrize("value", [1e12, float("nan")])
def test_a_diverged_method_is_marked_at_the_edge_and_does_not_stretch_the_axis(
    tmp_path_factory, drawn, value
):
    config = {**CONFIG, "metric": "none", "methods": {"fedavg": {}, "fo": {"algorithm": "gmeta"}}}
    good = load_run(library.run(config, out=tmp_path_factory.mktemp("runs") / "loss").path)
    for spec in (chart.to_dict() for _, _, chart in all_charts([good])):
        marks = [layer["mark"] for layer in spec.get("layer", [spec])]
        assert not any(mark.get("clip") or "triangle" in mark.get("shape", "") for mark in marks)
    bad = diverged(good, value)
    specs = {name: chart.to_dict() for name, _, chart in all_charts([bad])}
    for name, axis in {"results-seen": "x", "rounds-seen": "y", "steps": "y"}.items():
        layers = specs[name]["layer"]
        scales = [own["encoding"][axis]["scale"] for own in layers if axis in own["encoding"]]
        assert all(own == scales[0] for own in scales), name
        low, high = scales[0]["domain"]
        assert -5 < low < high < 20, name  # of all others
        edges = [
            own for own in layers if own["mark"].get("shape") in ("triangle-up", "triangle-right")
        ]
        if value == 1e12 or name == "results-seen":  # curves have no points that are not finite
            (edge,) = edges
            rows = specs[name]["datasets"][edge["data"]["name"]]
            assert {row["method"] for row in rows} == {"fo"}
            assert {row["edge"] for row in rows} == {high}
            assert {row["mean"] for row in rows} == {"1e+12" if value == 1e12 else "diverged"}
            others = [
                own["mark"] for own in layers if own is not edge and own["mark"]["type"] != "text"
            ]
            assert all(mark["clip"] for mark in others)
    agents = specs["agents"]["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert agents[1] < 20


def test_labels_of_null_baselines_do_not_extend_an_axis_of_shares():
    ends = [
        {"method": name, "mean": mean} for name, mean in zip("abc", (1.0, 1.0, 0.99), strict=True)
    ]
    spread = spread_labels(ends, [{"mean": 0.6}, {"mean": 1.0}])
    assert [round(own["mean"], 3) for own in spread] == [0.952, 0.976, 1.0]
    assert {own["method"] for own in spread} == set("abc")


def test_a_method_looks_the_same_by_its_name_and_by_the_label_of_its_first_line():
    """Charts by number of steps name methods, others their lines such as "ditto after 0 steps"."""
    styles = Styles.of(["a", "b after 0 steps", "b after 1 step"], {"b": "b after 0 steps"})
    for look in (styles.colours, styles.shapes):
        assert look(["b"]) == look(["b after 0 steps"]) != look(["b after 1 step"])
        assert look(["a"]) != look(["b"])
    assert styles.colours(["nobody"]) == [GREY]
