"""The privacy screen: the hub's guarantee, and the budget spent in total and per contributor."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query

from gym_fed.core.errors import GymError
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from gym_fed.web.app import Looking
from gym_server.privacy.budget import num_spent_on, report, rounds_paid
from gym_server.web.entries import names_of
from gym_server.web.hub_view import HubView

_MAX_ROUNDS_AHEAD = 1000
"""Maximum number of future rounds that are checked against the budget."""


def routes(view: HubView) -> APIRouter:
    """Return the route ``privacy``: `gym-server privacy` with a page of its contributors."""
    found = APIRouter()
    if view.config.privacy is not None:
        threading.Thread(target=_prepare, name="web-privacy", daemon=True).start()

    @found.get("/privacy")
    def privacy(
        visitor: Looking,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> dict[str, Any]:
        """Return `gym-server privacy --json` with a page of contributors, and the rounds that the budget pays for."""
        shown = report(view.config, view.state.database, offset, limit)
        with view.state.database.reading() as tx:
            known = names_of(tx, [one["contributor"] for one in shown["contributors"]])
        secure, local = view.config.secure_aggregation, view.config.recipe.privacy
        return {
            **shown,
            "contributors": [
                {**one, "name": known.get(one["contributor"], "")} for one in shown["contributors"]
            ],
            "total": num_spent_on(view.state.database) if shown["central"] else 0,
            "rounds_paid": rounds_paid(view.config, view.state.database, _MAX_ROUNDS_AHEAD)
            if shown["central"]
            else None,
            "max_rounds_ahead": _MAX_ROUNDS_AHEAD,
            "secure_aggregation": None if secure is None else {"threshold": secure.threshold},
            "local": None if local is None else local.model_dump(mode="json"),
        }

    return found


def _prepare() -> None:
    """Import the privacy accounting, which takes seconds, before the first page needs it."""
    with suppress(GymError):
        epsilon([NoiseEvent(noise_multiplier=1.0)], 1e-5)
