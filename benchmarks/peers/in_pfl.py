"""pfl-research: its FederatedAveraging in one process. It has no meta-gradients."""

import random

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from problem import LOCAL_STEPS, load, paper_module
from torch import nn

from plain import Samples  # isort: skip

NO_EVALUATION = 10**9  # after the first iteration


class Classifier(nn.Module):
    """The network with the functions that pfl calls."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.module(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


def pfl_research(folder, sizes, serve):
    torch.set_num_threads(1)
    data = load(folder)
    samples = Samples(
        data.samples.inputs, data.samples.targets, data.split.train, sizes.batch * LOCAL_STEPS
    )
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(samples.draw(user)[0]),
        lambda: random.randrange(sizes.agents),
    )
    module = Classifier(paper_module(sizes.inputs))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    backend, algorithm = SimulatedBackend(users, users), FederatedAveraging()
    how = NNTrainHyperParams(
        local_num_epochs=None,
        local_num_steps=LOCAL_STEPS,
        local_learning_rate=0.01,
        local_batch_size=sizes.batch,
    )
    done = 0

    def fedavg():
        nonlocal done
        done += 1
        wanted = NNAlgorithmParams(done, NO_EVALUATION, sizes.cohort, None)
        algorithm.run(wanted, backend, model, how, send_metrics_to_platform=False)

    serve({"FedAvg": fedavg})
