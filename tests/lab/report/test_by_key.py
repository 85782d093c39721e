"""Charts of scores by key plot exactly the scores that they are given."""

import math

import pytest

from lab.report.test_charts import points
from nufed.lab.analysis.comparison import KeyedScore
from nufed.lab.report.charts import score_by_key, score_by_two_keys
from nufed.lab.report.style import GREY, PALETTE, Styles

ALPHAS = (0.01, 0.1, 1.0)


def keyed(method, alpha, steps=1, **more):
    mean = 0.3 + alpha / 10 + steps / 100 + len(method) / 1000
    return KeyedScore({"data.dirichlet": alpha, "method.adapt_steps": steps}, method, mean, **more)


def test_scores_and_intervals_by_one_key():
    scores = [keyed(m, a, half_width=0.02) for m in ("fedavg", "gmeta") for a in ALPHAS]
    nulls = [keyed("local", a, baseline=True) for a in ALPHAS]
    diverged = KeyedScore({"data.dirichlet": 1.0}, "fedavg", math.nan)
    spec = score_by_key([*scores, *nulls, diverged], "data.dirichlet").to_dict()
    wanted = [(s.method, s.keys["data.dirichlet"], s.mean) for s in scores]
    assert points(spec, "line", "color", "x", "y") == wanted
    bars = [(s.method, s.mean - 0.02, s.mean + 0.02) for s in scores]
    assert points(spec, "rule", "color", "y", "y2") == bars
    flat = [(s.method, s.keys["data.dirichlet"], s.mean) for s in nulls]
    assert points(spec, "dashed line", "detail", "x", "y") == flat
    assert points(spec, "text", "text", "x") == [("local", 1.0)]  # beside the end of its line
    encoding = spec["layer"][-1]["encoding"]
    assert encoding["x"]["scale"]["type"] == "log" and encoding["x"]["title"] == "data.dirichlet"
    assert encoding["color"]["scale"]["range"] == PALETTE[:2]
    assert spec["layer"][0]["mark"]["color"] == GREY


@pytest.mark.parametrize(
    ("values", "kind", "type"),
    [((0, 1, 5), "Q", "linear"), ((1, 2, 3), "Q", "linear"), (("b", "a"), "N", None)],
)
def test_the_axis_fits_the_values(values, kind, type):
    scores = [KeyedScore({"key": value}, "m", 0.5) for value in values]
    spec = score_by_key(scores, "key").to_dict()
    axis = spec["layer"][0]["encoding"]["x"]
    assert axis["type"] == {"Q": "quantitative", "N": "nominal"}[kind]
    assert axis["scale"]["type"] == type if type else axis["sort"] == list(values)
    # lines would give an order to names
    assert len(points(spec, "line", "x")) == (len(values) if kind == "Q" else 0)
    assert len(points(spec, "point", "x")) == len(values)


def test_a_heat_map_of_two_keys_shows_the_mean_of_each_cell():
    scores = [keyed("gmeta", a, n) for a in ALPHAS for n in (10, 2)]
    spec = score_by_two_keys([*scores, *scores], "data.dirichlet", "method.adapt_steps").to_dict()
    found = points(spec, "rect", "x", "y", "color")
    keys = [f"{s.keys['data.dirichlet']:g} {s.keys['method.adapt_steps']}" for s in scores]
    assert [f"{x} {y}" for x, y, _ in found] == keys
    assert [mean for *_, mean in found] == pytest.approx([s.mean for s in scores])
    encoding = spec["layer"][0]["encoding"]
    assert encoding["x"]["sort"] == ["0.01", "0.1", "1"] and encoding["y"]["sort"] == ["2", "10"]


def test_a_method_keeps_its_colour_and_symbol_wherever_it_is():
    styles = Styles.of([f"m{i}" for i in range(64)])
    pairs = list(zip(styles.colours(styles.names), styles.shapes(styles.names), strict=True))
    assert len(set(pairs)) == 64
    some = ["m40", "m3"]
    found = zip(styles.colours(some), styles.shapes(some), strict=True)
    assert list(found) == [pairs[40], pairs[3]]
