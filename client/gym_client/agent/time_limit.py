"""Enforce ``max_seconds`` of a contributor's policy for all work of one task."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from gym_client.agent.hooks import Hooks
from gym_client.agent.policy import Policy
from gym_fed.core.bounded.pool import evaluation_deadline
from gym_fed.core.errors import ErrorCode, GymError


class TimeLimit:
    """Time limit of one task; it starts when the object is created.

    Args:
        policy: Gives ``max_seconds``.
        hooks: Their ``should_stop`` also ends the work.
    """

    def __init__(self, policy: Policy, hooks: Hooks) -> None:
        self._max_seconds, self._hooks = policy.max_seconds, hooks
        self._until = time.monotonic() + policy.max_seconds

    def is_over(self) -> bool:
        """True if the time is used up."""
        return time.monotonic() > self._until

    def require(self, phase: str) -> None:
        """Raise if the time is used up or the contributor wants to stop.

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
        """Return the error for a task whose time ran out during ``phase``."""
        return GymError(
            ErrorCode.POLICY_REFUSED,
            f"the task exceeded max_seconds ({self._max_seconds:g} s) of this machine's policy during {phase}",
            "raise max_seconds in policy.yaml to allow it",
        )

    def bounding_templates(self) -> AbstractContextManager[None]:
        """Apply the limit to rendering the rows with the base's chat template, inside the block."""
        return evaluation_deadline(self._until, self.error("preparation of the rows"))
