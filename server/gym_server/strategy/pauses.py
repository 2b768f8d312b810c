"""The wait of a hub that its coordinator paused: it keeps serving, and looks for the end of the pause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gym_server.federation import Federation

log = logging.getLogger("gym_server")

_POLL_SECONDS = 0.5


def wait_while_paused(fed: Federation, should_stop: Callable[[], bool]) -> None:
    """Return when rounds may begin again, or when ``should_stop`` says so."""
    pause = fed.steering.paused()
    if pause is None:
        return
    log.info("%s; no round begins until gym-server resume", pause)
    while pause is not None and not should_stop():
        time.sleep(_POLL_SECONDS)
        fed.live_config.follow()
        pause = fed.steering.paused()
    if pause is None:
        log.info("the pause is over")
