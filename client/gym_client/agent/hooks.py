"""How work inside a Flower ``ClientApp`` reports its progress, and learns that it should stop.

Flower hands an app a message and a context and nothing else, so the agent sets these hooks around the call.
In a stock Flower deployment nobody does, and they are silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from gym_client.agent.policy import Policy
from gym_fed.core.bounded.pool import evaluation_deadline
from gym_fed.core.errors import ErrorCode, GymError

Progress = Callable[[str, int, int, float | None], None]
"""Phase (fetch, train, encode, upload), done, total, loss."""


@dataclass(frozen=True)
class Hooks:
    """What the agent listens to while an app works."""

    progress: Progress = lambda phase, done, total, loss: None
    should_stop: Callable[[], bool] = lambda: False
    now: Callable[[], float] = time.time
    """The hub's time, which signed manifests carry."""


_current: ContextVar[Hooks | None] = ContextVar("gym_client_hooks", default=None)


def current_hooks() -> Hooks:
    """The hooks of the call under way; silent ones where nobody set any."""
    return _current.get() or Hooks()


@contextmanager
def hooks_set(hooks: Hooks) -> Iterator[None]:
    """Set the hooks for the calls inside the block."""
    token = _current.set(hooks)
    try:
        yield
    finally:
        _current.reset(token)


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
