"""From one machine to a cluster

A run consists of trainings: one for each method and seed, and the null baselines of each seed. They are independent, and where they run changes no bit. This
trains a run in three tasks that share a directory, as a job array does, loses one of them, and collects; then it compares with the same run in one go.
"""

# %%
# ## 1. One go
from pathlib import Path

import nufed

config = {
    "name": "array",
    "rounds": 10,
    "seeds": [0, 1],
    "data": {"agents": 12, "samples_per_agent": 40, "dirichlet": 0.3},
    "method": {"meta_lr": 0.3, "adapt_lr": 0.1, "batch_size": 8},
    "methods": {"fedavg": {}, "gmeta": {"adapt_steps": 2}},
    "baselines": ["untrained"],
}
whole = nufed.run(config, out="whole", figures=False)

# %%
# ## 2. Three tasks
# Task k of 3 does every third training, the longest first. On a cluster each is a process of its own: `nufed run FILE --out shared --part 1/3`, or
# `nufed submit FILE --out shared --parts 3` for Slurm, and the tasks may start at the same moment. Here two of them run, and the third is lost.
for task in (1, 2):
    nufed.run(config, out="shared", part=(task, 3), figures=False)
print(sorted(str(p.parent.relative_to("shared")) for p in Path("shared").rglob("done.json")))

# %%
# ## 3. Collect
# `nufed run --resume shared` does the trainings that are missing, and writes the results. A lost task costs time and nothing else.
collected = nufed.resume("shared", figures=False)
print(sorted(str(p.parent.relative_to("shared")) for p in Path("shared").rglob("done.json")))

# %%
# ## 4. The same bits
for file in sorted(Path("whole").rglob("model.safetensors")):
    print(
        file.relative_to("whole"),
        file.read_bytes() == Path("shared", file.relative_to("whole")).read_bytes(),
    )

# %%
# On a cluster of Ray the same is `nufed run FILE --ray auto`, also for sweeps and searches; [from one core to a cluster](../scale.md) says which to
# take, and what a round costs beside its work.
print(collected.to_json() == whole.to_json())
