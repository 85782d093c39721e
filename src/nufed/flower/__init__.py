"""The same Algorithm on Flower: data stays at its sites, only vectors and checked numbers travel.

::

    server (ServerApp)                             site (ClientApp), one per agent
      query     who are you?                  ->     its number and name
      train     round, the server's vectors   ->     one client_update on its own batches
                                              <-     its vectors, its number of samples, their cost
      close_round: check, leave out, combine
      evaluate  the last model                ->     personalises and tests on its own data
                                              <-     loss and score before and after every step

What both run is a :class:`Plan`. Who is asked, which batches are drawn and how updates are combined
is nufed's own, so the same seed gives the very bits of the simulator's direct engine. A site keeps
its state itself (:mod:`nufed.flower.memory`).

With ``[privacy]`` vectors leave a site clipped and noisy (:mod:`nufed.flower.privacy`), instead of
its number of samples it says 1, and it sends no scores unless the configuration says so. The server
keeps account of what that costs (:mod:`nufed.flower.account`).

Flower's processes report home and install packages unless they are told not to: importing this
package tells this process, and whoever starts others gives them :data:`SETTINGS`.
"""

# ruff: noqa: E402
import os

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
os.environ.update(SETTINGS)  # before flwr is imported: it reads them then

from nufed.flower.app import App

__all__ = ["SETTINGS", "App"]
