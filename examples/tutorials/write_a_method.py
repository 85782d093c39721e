"""Write a method

A method is one frozen dataclass. This one is FedProx whose agents keep an average of the models that they trained; it takes 25 lines and
gets engines, worker processes, checkpoints, Flower and the report without another.
"""

# %%
# ## 1. The method
# `agent_update` is the agent's half of a round and the only function that is needed. This method also keeps a state, and so says what a personal
# model is. Fields made by `setting` are the keys of a configuration.
from dataclasses import dataclass

import nufed
from nufed.algorithms import AgentResult, Cost, LocalTraining, Notes, Personal
from nufed.settings import setting


@dataclass(frozen=True)
class Mine(LocalTraining):
    """FedProx; an agent's personal model is an average of the models that it trained."""

    proximal: float = setting(0.1, "μ, weight of the proximal term", least=0)
    notes = Notes(newcomer="uses the global model", shown_steps=0)

    def agent_init(self, objective, received):
        return {"personal": received["model"]}

    def agent_update(self, context, received, state):
        def gradient(w, batch):  # of f(w) + μ/2·‖w − w_k‖²
            return context.objective.grad(w, batch) + self.proximal * (w - received["model"])

        w = self.descend(context, received["model"], gradient)
        cost = Cost(self.steps_per_round(context))
        return AgentResult({"model": w}, {"personal": (state["personal"] + w) / 2}, cost)

    def personal_model(self, context, received, state):
        return Personal({"model": (state or {"personal": received["model"]})["personal"]})


# %%
# ## 2. Is it right?
# Prove it where the answer is known: with μ = 0 the global model must be FedAvg's, to the bit.
small = {
    "name": "mine",
    "rounds": 20,
    "data": {"agents": 20, "samples_per_agent": 60, "dirichlet": 0.3, "unseen_agents": 4},
    "method": {"meta_lr": 0.3, "adapt_lr": 0.1, "batch_size": 10, "local_steps": 4},
}
methods = {"mine": Mine(proximal=0.0), "fedavg": nufed.fedavg()}
same = nufed.run(small | {"baselines": []}, methods=methods, figures=False)
means = {row.name: row.shared.mean for row in same.rows() if row.group == "seen"}
print(len(set(means.values())) == 1)

# %%
# ## 3. Compare it
run = nufed.run(small, methods={"mine": Mine(), "fedavg": nufed.fedavg()}, figures=False)
for row in run.rows():
    print(f"{row.group:7} {row.name:20} {row.personal.mean:.1%}")
