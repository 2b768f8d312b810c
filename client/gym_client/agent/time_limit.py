"""``max_seconds`` of a contributor's policy: how long everything that one task causes may take here."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from gym_client.agent.hooks import Hooks
from gym_client.agent.policy import Policy
from gym_fed.bounded.pool import deadline_set
from gym_fed.errors import ErrorCode, GymError


class TimeLimit:
    """The time that is left for one task, from when this is made.

    Args:
        policy: Its ``max_seconds`` counts.
        hooks: Their ``should_stop`` ends the work as well.
    """

    def __init__(self, policy: Policy, hooks: Hooks) -> None:
        self._max_seconds, self._hooks = policy.max_seconds, hooks
        self._until = time.monotonic() + policy.max_seconds

    def is_over(self) -> bool:
        """True if no time is left."""
        return time.monotonic() > self._until

    def require(self, phase: str) -> None:
        """Stop here if no time is left, or the contributor wants to stop.

        Raises:
            GymError: ``POLICY_REFUSED`` or ``INTERRUPTED``.
        """
        if self._hooks.should_stop():
            raise GymError(
                ErrorCode.INTERRUPTED,
                f"stopped during {phase}",
                "run the same command again; training resumes from its checkpoint",
            )
        if self.is_over():
            raise self.error(phase)

    def error(self, phase: str) -> GymError:
        """The error for a phase during which the time ran out."""
        return GymError(
            ErrorCode.POLICY_REFUSED,
            f"the task took longer than this machine's max_seconds of {self._max_seconds:g}, during {phase}",
            "raise max_seconds in policy.yaml to allow it",
        )

    def bounding_templates(self) -> AbstractContextManager[None]:
        """Within it, rendering the rows with the base's chat template is part of the time."""
        return deadline_set(self._until, self.error("preparation of the rows"))
