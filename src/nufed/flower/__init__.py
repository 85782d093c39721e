"""The same Algorithm on Flower: data stays at its sites, only vectors and checked numbers travel.

::

    server (ServerApp)                             site (ClientApp), one per agent
      query     identify yourself             ->     its number and name
      train     round, the server's vectors   ->     one agent_update on its own batches
                                              <-     its vectors, its number of samples, the cost
      close_round: check, reject, aggregate
      evaluate  the last model                ->     personalises and tests on its own data
                                              <-     loss and score before and after every step

Both run the same :class:`Plan`. nufed itself selects cohorts, draws batches and aggregates updates,
so the same seed is bit-identical to the simulator's direct engine. A site stores its own state
(:mod:`nufed.flower.app.site`).

With ``[privacy]`` vectors leave a site clipped and noisy (:mod:`nufed.flower.app.privacy`),
its number of samples is reported as 1, and it sends no scores unless the configuration says so. The
server accounts for the privacy spent.

By default Flower's processes send telemetry and install packages: importing this package disables
both for this process, and processes started from it get :data:`SETTINGS`.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nufed.flower.app.apps import App

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
os.environ.update(SETTINGS)  # before flwr is imported: it reads them then

__all__ = ["SETTINGS", "App"]

if not TYPE_CHECKING:  # the server's process imports this package, and never torch

    def __getattr__(name: str) -> Any:
        if name != "App":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from nufed.flower.app.apps import App

        globals()[name] = App
        return App
