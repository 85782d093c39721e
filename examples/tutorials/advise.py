"""Which method to start with

Before any real training, `nufed advise CONFIG` makes a pilot of at most two minutes. On a sample of agents it measures how they differ, what training alone
reaches, and what one method of each kind reaches with three or four step sizes. It says which to start with, why, and how sure that is.
"""

# %%
# ## 1. A problem
# Any configuration, or preset, that has a validation part; methods need not be named. What `[method]` sets is shared by all that are tried. Here 40 agents
# have digits, each of them few of the ten classes, and ten of the agents are newcomers:
from pathlib import Path

Path("mine.toml").write_text("""\
rounds = 24
participation = 0.2
eval_steps = 5

[data]
agents = 40
samples_per_agent = 40
dirichlet = 0.3
validation = 0.25
test = 0.25
unseen_agents = 10

[model]
args = { hidden = [16], activation = "tanh" }

[method]
batch_size = 10
""")

# %%
# ## 2. The advice
# On the command line this is `nufed advise mine.toml`:
from nufed.lab.cli.commands import app

app(["advise", "mine.toml"], standalone_mode=False)

# %%
# ## 3. How to read it
# - **The table** has the mean score of the agents that count, on validation samples, after the steps of fine-tuning that the configuration shows and before them.
#   *behind* is the paired difference to the recommended method. Where a configuration holds out newcomers, a third of the sample stands for them; its own
#   newcomers, and all test samples, stay unread.
# - **The rule** is a few comparisons. Methods within one standard error of the pilot's best are *near*; of these the one with the smallest sum of its rank in
#   the pilot and its mean rank on [the board](../board.md) is recommended. Training alone takes part only if the others got a quarter of their rounds.
#   It is all in `lab/analysis/recommend.py`.
# - **How often it is right** was measured on the board, with one problem held out at a time: the rule gets a pilot on a problem whose results it does not
#   know. The figure is printed with every recommendation: trust the pilot's intervals more than the name. `make board-advice` repeats it.
# - **γ_G and γ_H** tell how gradients and curvatures of agents differ; where curvatures agree, [training for ν > 1 has nothing to gain](../when_nu_pays.md).
# - **What would help**: the recommended method is trained again with half of the agents, and with half of every agent's samples.
#
# A pilot is short, and its scores are those of a few agents: it replaces no tuning. Put the printed table into `mine.toml`, beside FedAvg, and search
# both with `nufed tune` ([tune fairly](tune.md)). `--minutes 10` makes a longer pilot; Ctrl-C ends it early, with the advice from what is done. The JSON
# file has everything, with the scores of every agent; the same seed gives the same numbers, as far as the time reached.
print(sorted(path.name for path in Path("runs").iterdir()))
