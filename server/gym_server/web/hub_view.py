"""What every screen of the dashboard is made from."""

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
"""Of one list in one answer; a list says how many there are, and pages ask for the next part."""


@dataclass
class HubView:
    """What every screen reads, and whether the hub runs.

    Attributes:
        state: The hub's state.
        live_config: The config that applies now.
        is_running: Whether its rounds run in this process; a dashboard on a stopped hub's folder changes nothing.
        newest: Answers for the newest version, where the operator allows it.
        started_at: Unix seconds.
    """

    state: HubState
    live_config: LiveConfig
    is_running: bool
    newest: NewestModel | None = None
    started_at: float = field(default_factory=time.time)

    @property
    def config(self) -> ServerConfig:
        """The config that applies now."""
        return self.live_config.current

    def may_change(self, visitor: Visitor) -> bool:
        """Whether this visitor's page offers what changes the hub."""
        return self.is_running and self.is_operator(visitor)

    def is_operator(self, visitor: Visitor) -> bool:
        """Whether a visitor is shown what the operator alone may see."""
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
        """Whether a visitor is not shown what private rounds keep out of the open ledger.

        That is: refusals and the reasons of rejections, norms, sizes, who is connected or at work, and moments. The
        operator is trusted with them (docs/privacy.md, "What is released, and what covers it").
        """
        return self.state.ledger.private and not self.is_operator(visitor)

    def moment(self, visitor: Visitor, seconds: float | None) -> float | None:
        """When something of a round was, as this visitor may know it: of private rounds the hour, as in the ledger."""
        if seconds is None or not self.is_sealed_from(visitor):
            return seconds
        return float(int(seconds) // BUCKET_SECONDS * BUCKET_SECONDS)
