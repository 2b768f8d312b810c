"""The hub's state and config, as read by the dashboard's pages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web.access import Role, Visitor
from gym_server.ledger.times import BUCKET_SECONDS
from gym_server.rounds.recipes import LiveConfig
from gym_server.state import HubState
from gym_server.web.newest_model import NewestModel

MAX_ROWS = 500
"""Maximum number of rows of a list in one response."""


@dataclass
class HubView:
    """The data that all pages of the dashboard share.

    Attributes:
        state: The hub's state.
        live_config: The current config.
        is_running: True if the hub's rounds run in this process. A dashboard on the folder of a stopped hub is
            read-only.
        newest: Server of the newest version; None unless the operator enables it.
        started_at: The start time in Unix seconds.
    """

    state: HubState
    live_config: LiveConfig
    is_running: bool
    newest: NewestModel | None = None
    started_at: float = field(default_factory=time.time)

    @property
    def config(self) -> ServerConfig:
        """Return the current config."""
        return self.live_config.current

    @property
    def is_measured(self) -> bool:
        """Return True if the hub has held-out rows, so that the base and every version have a loss."""
        return self.config.gate.heldout is not None

    def may_change(self, visitor: Visitor) -> bool:
        """Return True if the pages offer this visitor actions that change the hub."""
        return self.is_running and self.is_operator(visitor)

    def is_operator(self, visitor: Visitor) -> bool:
        """Return True if the visitor may see data that is only for the operator."""
        return visitor.role >= Role.OPERATOR

    def require_running(self) -> None:
        """Refuse a change by a dashboard that only reads the hub's folder.

        Raises:
            GymError: ``PERMISSION_DENIED``.
        """
        if not self.is_running:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                "this dashboard only reads the hub's folder",
                "use the dashboard of the running hub (gym-server run --dashboard), or the command line",
            )

    def is_sealed_from(self, visitor: Visitor) -> bool:
        """Return True if the visitor may not see the details that private rounds keep out of the ledger's clear text.

        These details are refusals, the reasons of rejections, norms, sizes, exact times, and who is connected or
        training. The operator may see them (docs/privacy.md, "What is released, and what covers it").
        """
        return self.state.ledger.private and not self.is_operator(visitor)

    def moment(self, visitor: Visitor, seconds: float | None) -> float | None:
        """Return a time with the precision that the visitor may see: in private rounds the hour, as in the ledger."""
        if seconds is None or not self.is_sealed_from(visitor):
            return seconds
        return float(int(seconds) // BUCKET_SECONDS * BUCKET_SECONDS)
