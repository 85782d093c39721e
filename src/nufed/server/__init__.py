"""The server's half of a round: cohort, checks, quorum."""

from nufed.server.downlink import Downlink as Downlink, replaced as replaced, to_send as to_send
from nufed.server.incoming import Incoming as Incoming, sums_suffice as sums_suffice
from nufed.server.rounds import (
    TOO_LATE as TOO_LATE,
    Attempts as Attempts,
    Progress as Progress,
    QuorumError as QuorumError,
    Rules as Rules,
    choose_cohort as choose_cohort,
    close_round as close_round,
    cohort_size as cohort_size,
    counted_parameters as counted_parameters,
    initial_server as initial_server,
    next_server as next_server,
    open_round as open_round,
    server_model as server_model,
    update_norm as update_norm,
)
from nufed.server.states import (
    AgentStates as AgentStates,
    MemoryStates as MemoryStates,
    StatesOf as StatesOf,
    on_device as on_device,
)
