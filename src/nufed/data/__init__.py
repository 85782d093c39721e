"""Data: sources of samples, their split over agents and parts, and batches."""

from nufed.data.digits import digits
from nufed.data.federation import (
    AgentBatches,
    Federation,
    Picked,
    ScoredOn,
    SmallAgents,
    check_single_sample,
)
from nufed.data.partition import (
    PARTITIONS,
    DirichletReusing,
    Partition,
    Reuse,
    Rows,
    check_arguments,
    check_dealt,
    dirichlet,
    dirichlet_by_class,
    given,
    iid,
    quantity_skew,
    settings_taken,
    shards,
)
from nufed.data.samples import Samples, as_samples
from nufed.data.shift import SHIFTS, rows_by_agent
from nufed.data.sinusoid import sinusoid
from nufed.data.split import Split, choose_unseen, lazy_split, make_split, part_sizes, site_split

__all__ = [
    "PARTITIONS",
    "SHIFTS",
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
    "check_single_sample",
    "choose_unseen",
    "digits",
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
    "sinusoid",
    "site_split",
]
