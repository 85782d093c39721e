"""nufed's engine for this job, and the PyTorch loop of plain.py."""

import torch
from problem import EVALUATION, LOCAL_STEPS, METHODS, load, paper_module

from jobs import Ours, Plain  # isort: skip
from nufed import Objective
from nufed.simulation.choose_engine import Engines


def jobs_of(contender, sizes):
    """What is timed, by name."""
    cohort, everyone = range(sizes.cohort), range(sizes.agents)
    found = {n: lambda job=job: contender.round(cohort, *job) for n, job in METHODS.items()}
    return found | {EVALUATION: lambda: contender.evaluate(everyone)}


def plain_loop(folder, sizes, serve):
    torch.set_num_threads(1)
    loop = Plain(paper_module(sizes.inputs), load(folder), sizes.batch, LOCAL_STEPS)
    serve(jobs_of(loop, sizes))


def nufed(folder, sizes, serve):
    """The engine that `auto` chooses for long runs of this job, with one worker."""
    torch.set_num_threads(1)
    objective = Objective(paper_module(sizes.inputs))
    engine = Engines(objective, load(folder), 0).get("gram_onednn")
    serve(jobs_of(Ours(engine, sizes.batch, LOCAL_STEPS), sizes))
