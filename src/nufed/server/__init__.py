"""The server's half of a round: cohort, checks, quorum."""

from nufed.server.downlink import Downlink, replaced, to_send
from nufed.server.incoming import Incoming, sums_suffice
from nufed.server.rounds import (
    TOO_LATE,
    Attempts,
    Progress,
    QuorumError,
    Rules,
    choose_cohort,
    close_round,
    cohort_size,
    counted_parameters,
    initial_server,
    next_server,
    open_round,
    server_model,
    update_norm,
)
from nufed.server.states import AgentStates, MemoryStates, StatesOf, on_device

__all__ = [
    "TOO_LATE",
    "AgentStates",
    "Attempts",
    "Downlink",
    "Incoming",
    "MemoryStates",
    "Progress",
    "QuorumError",
    "Rules",
    "StatesOf",
    "choose_cohort",
    "close_round",
    "cohort_size",
    "counted_parameters",
    "initial_server",
    "next_server",
    "on_device",
    "open_round",
    "replaced",
    "server_model",
    "sums_suffice",
    "to_send",
    "update_norm",
]
