"""From a federation to an adapted model: train, release, adapt, and measure the gain.

Run it anywhere: `python examples/tutorial.py`. docs/tutorial.md explains it.
"""

from pathlib import Path

import altair as alt
import numpy as np

import nufed
from nufed.data import digits

everything = digits()
rng = np.random.default_rng(0)
order = rng.permutation(len(everything))
ours, theirs = order[:900], order[900:]  # theirs: users who are not in the federation

# 1. Train: 30 agents with 30 digits each, some of them rare or missing at most agents.
run = nufed.run(
    {
        "name": "tutorial",
        "rounds": 40,
        "data": {"agents": 30, "samples_per_agent": 30, "dirichlet": 0.3, "unseen_agents": 5},
        "model": {"name": "fcnn", "args": {"hidden": [32], "activation": "tanh"}},
        "method": {"adapt_steps": 3, "adapt_lr": 0.1, "meta_lr": 0.3, "batch_size": 10},
    },
    data=nufed.Samples(
        everything.inputs[ours],
        everything.targets[ours],
        classes=everything.classes,
        scale=everything.scale,
    ),
)
print(f"trained: {run.path / 'report.html'}")

# 2. Release: the run wrote a bundle, one file with the model and how to adapt it.
bundle = nufed.load_bundle(run.path / "bundles" / "gmeta.nufed")
print(bundle.card)

# 3. Adapt, as new users would: each writes four of the ten digits.
points = []
for user in range(8):
    mine = rng.choice(10, 4, replace=False)
    rows = theirs[np.isin(everything.targets[theirs], mine)]
    known, new = rows[:200], rows[200:]
    truth = [everything.classes[c] for c in everything.targets[new]]

    def accuracy(model, new=new, truth=truth):
        answers = [prediction.answer for prediction in model.predict(everything.inputs[new])]
        return float(np.mean([a == b for a, b in zip(answers, truth, strict=True)]))

    for samples in (20, 50, 200):
        own = everything.inputs[known[:samples]], everything.targets[known[:samples]]
        models = {
            "not adapted": bundle.unadapted(),
            "3 steps, as trained for": bundle.adapt(*own),
            "steps=auto": bundle.adapt(*own, steps="auto", max_steps=30),
        }
        for name, model in models.items():
            points.append({"model": name, "samples": samples, "accuracy": accuracy(model)})
    print(f"user {user + 1}: " + "; ".join(models["steps=auto"].report.words()[:2]))

# 4. Measure the gain.
for samples in (20, 50, 200):
    shares = {
        name: np.mean(
            [p["accuracy"] for p in points if (p["model"], p["samples"]) == (name, samples)]
        )
        for name in models
    }
    print(
        f"{samples} samples: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    )

base = alt.Chart(alt.InlineData(values=points)).encode(
    x=alt.X("samples:O", title="own samples", axis=alt.Axis(labelAngle=0)),
    color=alt.Color("model:N", sort=list(models), legend=alt.Legend(title=None, orient="top")),
    xOffset=alt.XOffset("model:N", sort=list(models)),
)
axis = {"title": "accuracy on new samples", "scale": alt.Scale(zero=False)}
chart = base.mark_point(opacity=0.45).encode(
    y=alt.Y("accuracy:Q", axis=alt.Axis(format="%"), **axis)
) + base.mark_tick(thickness=3, size=22).encode(y=alt.Y("mean(accuracy):Q", **axis))
picture = Path(run.path) / "figures" / "tutorial.svg"
chart.properties(width=480, height=300).save(picture)
print(f"picture: {picture}")
