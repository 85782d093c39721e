"""Compare methods on your own data

What do federated methods bring to *your* agents? This takes arrays (yours may come from any file), trains five
methods on the same splits, cohorts and batches, and puts them beside null baselines. It runs in seconds.
"""

# %%
# ## 1. The data
# Inputs, targets, and the owner of each sample. Here 60 shops each see a product line of their own: the same
# eight measurements, but a rule for the four classes that differs from shop to shop.
import numpy as np
from torch import nn

import nufed

rng = np.random.default_rng(0)
shops, per_shop = 60, 40
common = rng.normal(size=(8, 4))
own = common + 0.4 * rng.normal(size=(shops, 8, 4))
inputs = rng.normal(size=(shops, per_shop, 8)).astype("float32")
targets = np.einsum("sni,sic->snc", inputs, own).argmax(-1)
owners = np.repeat(np.arange(shops), per_shop)
data = (inputs.reshape(-1, 8), targets.reshape(-1), owners)

# %%
# ## 2. The model and the methods
# Any `nn.Module`. `[method]` holds what all methods share, `methods` what differs. A fifth of each shop's samples is for
# choices (`validation`) and a fifth is scored (`test`); twenty shops take no part in training.
config = {
    "name": "shops",
    "rounds": 30,
    "eval_every": 30,
    "participation": 0.5,
    "data": {"validation": 0.2, "test": 0.2, "unseen_agents": 20},
    "method": {"meta_lr": 0.2, "adapt_lr": 0.1, "local_steps": 5, "batch_size": 8},
    "methods": {
        "fedavg": {},
        "gmeta": {"adapt_steps": 3},
        "ditto": {"weight": 0.1},
        "fedrep": {"head_steps": 5},
        "knn_per": {},
    },
}


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


run = nufed.run(config, data=data, model=model, figures=False)

# %%
# ## 3. Who is best, and for whom
# *global* is the server's model as it is, *personal* what a shop would use. Seen and unseen shops are different questions: a method with
# private parts may be good for the first and have little to offer to the second.
for row in run.rows():
    print(f"{row.group:7} {row.name:22} {row.kind:9} {row.personal.mean:.1%}")

# %%
# ## 4. Is the difference real?
# Differences are paired by shop, which removes what makes a shop easy or hard. *Better* and *worse* are said only where the 95 % interval
# excludes 0.
for pair in run.paired():
    if pair.against == "local":
        difference = f"{100 * pair.mean:+5.1f} ± {100 * pair.half_width:4.1f} points"
        print(f"{pair.group:7} {pair.name:22} − local {difference}  {pair.verdict}")

# %%
# ## 5. The page
# The report has all of it with charts; a browser opens it without a server. The step size of fine-tuning was chosen for each method on validation
# samples; the other settings are guesses, the same for all: [tune them](tune.md) before you believe a ranking.
print(run.path / "report.html")
