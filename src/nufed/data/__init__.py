"""Data: sources of samples, their split over agents and parts, and batches."""

from nufed.data.federation import AgentBatches, Federation, Picked, ScoredOn, SmallAgents
from nufed.data.named_partitions import (
    PARTITIONS,
    Partition,
    check_arguments,
    check_dealt,
    settings_taken,
)
from nufed.data.partition import DirichletReusing, Reuse, Rows, dirichlet, given, iid, shards
from nufed.data.samples import Samples, as_samples
from nufed.data.shift import SHIFTS, rows_by_agent
from nufed.data.sources import SOURCES
from nufed.data.split import Split, choose_unseen, lazy_split, make_split, part_sizes, site_split
from nufed.data.uneven import dirichlet_by_class, quantity_skew

__all__ = [
    "PARTITIONS",
    "SHIFTS",
    "SOURCES",
    "AgentBatches",
    "DirichletReusing",
    "Federation",
    "Partition",
    "Picked",
    "Reuse",
    "Rows",
    "Samples",
    "ScoredOn",
    "SmallAgents",
    "Split",
    "as_samples",
    "check_arguments",
    "check_dealt",
    "choose_unseen",
    "dirichlet",
    "dirichlet_by_class",
    "given",
    "iid",
    "lazy_split",
    "make_split",
    "part_sizes",
    "quantity_skew",
    "rows_by_agent",
    "settings_taken",
    "shards",
    "site_split",
]
