"""What every screen of the dashboard is made from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import APIRouter
from sqlalchemy import select

from gym_server.federation import Federation
from gym_server.store.tables import accounts

MAX_ROWS = 500
"""Of one list in one answer; a list says how many there are, and pages ask for the next part."""


@dataclass
class HubView:
    """An opened hub, and whether it runs.

    Attributes:
        fed: The hub.
        is_running: Whether its rounds run in this process; a dashboard on a stopped hub's folder changes nothing.
        started_at: Unix seconds.
    """

    fed: Federation
    is_running: bool
    started_at: float = field(default_factory=time.time)

    def names(self) -> dict[str, str]:
        """Names of accounts as their owners wrote them, by id."""
        with self.fed.database.reading() as tx:
            return {
                row.contributor: row.name
                for row in tx.execute(select(accounts.c.contributor, accounts.c.name))
            }


def router() -> APIRouter:
    """For the routes of one screen."""
    return APIRouter()
