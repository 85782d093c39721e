"""The chart of a benchmark: how many times faster than the PyTorch loop."""

import altair as alt


def draw(results, folder):
    """Save the chart as PNG and SVG; returns their paths."""
    for suffix in ("png", "svg"):
        path = folder / f"ratios.{suffix}"
        more = {"scale_factor": 2} if suffix == "png" else {}
        ratios(results["paper"]["methods"]).save(str(path), **more)
        yield path


def ratios(methods):
    rows = [
        {"job": job, "times faster": found["amortised"]["median"], **found["amortised"]}
        for job, found in methods.items()
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(alt.Y("job:N", sort=None, title=None))
    title = "times faster than the PyTorch loop, amortised over 300 rounds"
    bars = base.mark_bar(color="#0072B2").encode(alt.X("times faster:Q", title=title))
    spread = base.mark_rule(color="black").encode(alt.X("from:Q"), alt.X2("to:Q"))
    return (bars + spread).properties(width=420, height=180)
