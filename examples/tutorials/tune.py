"""Tune fairly

A comparison with one step size for all methods favours the method that it suits. `nufed.tune` gives each method the same budget, counted in
trials or in gradients, and scores trials on validation samples only. This searches two methods in seconds; real searches take hundreds of trials.
"""

# %%
# ## 1. The question
# Digits, each of them rare for most agents. FedAvg and gMeta have the same rounds, agents and batches. With one step size for both:
import nufed

config = {
    "name": "digits",
    "rounds": 20,
    "participation": 0.5,
    "baselines": ["local"],
    "data": {"agents": 20, "samples_per_agent": 60, "dirichlet": 0.3, "validation": 0.2},
    "model": {"args": {"hidden": [16]}},
    "method": {"batch_size": 8, "local_steps": 4, "meta_lr": 0.01, "adapt_lr": 0.05},
    "methods": {"fedavg": {}, "gmeta": {"adapt_steps": 3}},
}


def show(run):
    for row in run.rows():
        print(f"{row.name:8} {row.personal.mean:.1%}")


show(nufed.run(config, ["seeds=[7]"], figures=False))

# %%
# ## 2. The search
# Nine trials for each method. Which settings are searched, and in which range, every method declares itself; `meta_lr` and gMeta's `adapt_lr` here.
# `per="gradient"`, the default, counts gradients instead, so that an expensive method gets fewer trials.
search = {"halvings": 1, "finalists": 1, "repeats": 1}
found = nufed.tune(config | {"tune": search}, budget=9, per="trial", figures=False)
for name, settings in found.choices.items():
    print(name, {key: round(value, 4) for key, value in settings.items()})

# %%
# ## 3. The comparison
# The tuned configuration, with a seed that the search has not seen, is scored on test samples, which no trial has read.
show(nufed.run(found.path / "tuned.toml", ["seeds=[7]"], figures=False))

# %%
# ## 4. Was it enough?
# The page of the search answers: best so far by work, how much each setting matters, choices at the edge of a range, too few trials, and whether the
# order of methods is the same with other seeds. On the command line the same is `nufed tune FILE --budget 50`, then `nufed run` of its `tuned.toml`.
print(found.path / "tune.html")
