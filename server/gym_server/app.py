"""The hub's Flower ``ServerApp``: the same object runs inside `gym-server run` and on a stock SuperLink.

On a SuperLink, the run config's ``hub-dir`` names the hub's folder. A contributor is enrolled at its first signed
reply, if the hub's policy is ``open`` or lists its key. Deltas are sent inside the messages, as Flower sends arrays.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from gym_fed.core.errors import ErrorCode, GymError
from gym_server.federation import Federation
from gym_server.privacy.budget import check_promise
from gym_server.rounds.payload import ByReference, Inline
from gym_server.rounds.recipes import check_soup
from gym_server.strategy.durable import DurableDeltaSoup
from gym_server.strategy.grid import HubGrid

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation in ``context.run_config["hub-dir"]`` over ``grid``."""
    folder = context.run_config.get("hub-dir")
    if not isinstance(folder, str):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            "run config: hub-dir is missing",
            "set hub-dir to a folder created by gym-server init",
        )
    with Federation.open(Path(folder)) as federation, federation.hub_lock():
        check_soup(federation.config)
        check_promise(federation.config, federation.base, federation.database, federation.round_store)
        by_reference = isinstance(grid, HubGrid)
        cap = federation.max_update_bytes
        DurableDeltaSoup(federation, ByReference() if by_reference else Inline(federation.store, cap)).start(
            grid
        )
