"""The wait of a hub that its coordinator paused: it keeps serving, and looks for the end of the pause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.steering import Steering

log = logging.getLogger("gym_server")

_POLL_SECONDS = 0.5


def wait_while_paused(live_config: LiveConfig, steering: Steering, should_stop: Callable[[], bool]) -> None:
    """Return when rounds may begin again, or when ``should_stop`` says so."""
    pause = steering.paused()
    if pause is None:
        return
    log.info("%s; no round begins until gym-server resume", pause)
    while pause is not None and not should_stop():
        time.sleep(_POLL_SECONDS)
        live_config.follow()
        pause = steering.paused()
    if pause is None:
        log.info("the pause is over")
