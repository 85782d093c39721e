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
from nufed.data.omniglot import omniglot14
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
from nufed.data.samples import Column, Samples, Table, as_samples
from nufed.data.sensors import sensors
from nufed.data.shift import SHIFTS, rows_by_agent
from nufed.data.sinusoid import sinusoid
from nufed.data.split import Split, choose_unseen, lazy_split, make_split, part_sizes, site_split
from nufed.data.tables import (
    ColumnTally,
    Fill,
    Preparation,
    PreparedColumn,
    as_table,
    learn_preparation,
    pooled,
    prepare,
    tally,
)

__all__ = [
    "PARTITIONS",
    "SHIFTS",
    "AgentBatches",
    "Column",
    "ColumnTally",
    "DirichletReusing",
    "Federation",
    "Fill",
    "Partition",
    "Picked",
    "Preparation",
    "PreparedColumn",
    "Reuse",
    "Rows",
    "Samples",
    "ScoredOn",
    "SmallAgents",
    "Split",
    "Table",
    "as_samples",
    "as_table",
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
    "learn_preparation",
    "make_split",
    "omniglot14",
    "part_sizes",
    "pooled",
    "prepare",
    "quantity_skew",
    "rows_by_agent",
    "sensors",
    "settings_taken",
    "shards",
    "sinusoid",
    "site_split",
    "tally",
]
