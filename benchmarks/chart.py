"""The charts of a benchmark: cost of a round against ν, τ, cohort, workers and N."""

import altair as alt

TITLES = {
    "nu": "fine-tuning steps ν",
    "tau": "local updates τ",
    "cohort": "agents a round",
    "workers": "workers",
}
COLOURS = {"plain loop": "#777777", "direct": "#E69F00", "gram": "#0072B2"}


def draw(results, folder):
    """Save the charts as PNG and SVG; returns their paths."""
    panels = [panel(results["sweeps"][name], title) for name, title in TITLES.items()]
    agents = panel(
        {n: {"direct": r["seconds"]} for n, r in results["scale"].items()}, "agents N", log=True
    )
    charts = {
        "cost": alt.vconcat(
            alt.hconcat(*panels[:2]), alt.hconcat(*panels[2:]), alt.hconcat(agents)
        ),
        "ratios": ratios(results["paper"]["methods"]),
    }
    for name, chart in charts.items():
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            chart.save(str(path), **({"scale_factor": 2} if suffix == "png" else {}))
            yield path


def panel(sweep, title, log=False):
    rows = [
        {"x": int(x), "way": way.split(",")[0], "seconds": seconds}
        for x, found in sweep.items()
        for way, seconds in found.items()
    ]
    x = alt.X("x:Q", title=title, scale=alt.Scale(type="log" if log else "linear"))
    if not log:
        x = x.axis(tickMinStep=1)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(x, alt.Y("seconds:Q", title="seconds a round"), colour())
        .properties(width=260, height=180)
    )


def ratios(methods):
    rows = [
        {"job": job, "times faster": found["amortised"]["median"], **found["amortised"]}
        for job, found in methods.items()
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(alt.Y("job:N", sort=None, title=None))
    title = "times faster than the plain loop, amortised over 300 rounds"
    bars = base.mark_bar(color=COLOURS["gram"]).encode(alt.X("times faster:Q", title=title))
    spread = base.mark_rule(color="black").encode(alt.X("from:Q"), alt.X2("to:Q"))
    return (bars + spread).properties(width=420, height=180)


def colour():
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    return alt.Color("way:N", title=None, scale=scale)
