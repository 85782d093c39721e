"""The core alone: gMeta against FedAvg on ten agents, without files, configurations or pages."""

import numpy as np
import torch

from nufed import Federation, Objective, fedavg, gmeta
from nufed.data import digits, dirichlet, make_split
from nufed.evaluate import Measure, summarise
from nufed.models import fcnn
from nufed.simulation import DirectEngine, train

samples = digits()
labels, rng = samples.targets.numpy(), np.random.default_rng(0)
rows = dirichlet(labels, 10, samples_per_agent=60, concentration=0.3, rng=rng)
federation = Federation(samples, make_split(rows, seed=0, validation=0.0, test=0.3))

torch.manual_seed(0)
objective = Objective(fcnn(samples.input_shape, samples.outputs, hidden=(32,), activation="tanh"))
engine, accuracy = DirectEngine(objective, federation, seed=0), Measure("accuracy")
settings = {"meta_lr": 0.3, "adapt_lr": 0.05, "local_steps": 4, "batch_size": 10}
for algorithm in (fedavg(**settings), gmeta(adapt_steps=3, **settings)):
    *_, last = train(algorithm, engine, objective.initial(), rounds=20, participation=0.5)
    agents = {agent: last.states.get(agent) for agent in federation.split.agents}
    scores = engine.evaluate(algorithm, last.server, agents, steps=3, measure=accuracy)
    found = summarise(scores, step=3, measure=accuracy)
    name = type(algorithm).__name__
    print(f"{name:6}  global {found.global_mean:.1%}  personal, after 3 steps {found.mean:.1%}")
