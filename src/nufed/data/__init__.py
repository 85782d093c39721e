"""Data: where samples come from, who holds them, and how they come out as batches."""

from nufed.data.federation import AgentBatches, Federation, Picked, ScoredOn, SmallAgents
from nufed.data.partition import DirichletReusing, Reuse, dirichlet, given, iid, shards
from nufed.data.samples import Samples, as_samples
from nufed.data.sources import SOURCES
from nufed.data.split import Split, choose_unseen, lazy_split, make_split, part_sizes, site_split

PARTITIONS: dict[str, str] = {
    "auto": "given if the data has owners, else dirichlet",
    "dirichlet": "each agent draws a class distribution (α_d), then its samples by it (the paper)",
    "iid": "every agent gets a random part of the data",
    "shards": "every agent holds classes_per_agent classes",
    "given": "one agent per owner of the data (a natural federation)",
}

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "AgentBatches",
    "DirichletReusing",
    "Federation",
    "Picked",
    "Reuse",
    "Samples",
    "ScoredOn",
    "SmallAgents",
    "Split",
    "as_samples",
    "choose_unseen",
    "dirichlet",
    "given",
    "iid",
    "lazy_split",
    "make_split",
    "part_sizes",
    "shards",
    "site_split",
]
