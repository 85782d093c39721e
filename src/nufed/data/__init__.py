"""Data: sources of samples, their split over agents and parts, and batches."""

from nufed.data.built_in import digits as digits, sensors as sensors, sinusoid as sinusoid
from nufed.data.federation import (
    AgentBatches as AgentBatches,
    Federation as Federation,
    Picked as Picked,
    ScoredOn as ScoredOn,
    SmallAgents as SmallAgents,
    check_single_sample as check_single_sample,
)
from nufed.data.omniglot import omniglot14 as omniglot14
from nufed.data.partition import (
    PARTITIONS as PARTITIONS,
    DirichletReusing as DirichletReusing,
    Partition as Partition,
    Reuse as Reuse,
    Rows as Rows,
    check_arguments as check_arguments,
    check_dealt as check_dealt,
    dirichlet as dirichlet,
    dirichlet_by_class as dirichlet_by_class,
    given as given,
    iid as iid,
    quantity_skew as quantity_skew,
    settings_taken as settings_taken,
    shards as shards,
)
from nufed.data.samples import (
    Column as Column,
    Samples as Samples,
    Table as Table,
    as_samples as as_samples,
)
from nufed.data.shift import SHIFTS as SHIFTS, rows_by_agent as rows_by_agent
from nufed.data.split import (
    Split as Split,
    choose_unseen as choose_unseen,
    lazy_split as lazy_split,
    make_split as make_split,
    part_sizes as part_sizes,
    site_split as site_split,
)
from nufed.data.tables import (
    ColumnTally as ColumnTally,
    Fill as Fill,
    Preparation as Preparation,
    PreparedColumn as PreparedColumn,
    as_table as as_table,
    learn_preparation as learn_preparation,
    pooled as pooled,
    prepare as prepare,
    tally as tally,
)
