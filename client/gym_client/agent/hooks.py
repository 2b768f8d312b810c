"""Hooks through which code in a Flower ``ClientApp`` reports progress and checks whether to stop.

Flower passes only a message and a context to an app, so the agent sets these hooks around the call. Without an agent,
as in a stock Flower deployment, they do nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from gym_client.agent.policy import Policy
from gym_fed.core.bounded.pool import evaluation_deadline
from gym_fed.core.errors import ErrorCode, GymError

Progress = Callable[[str, int, int, float | None], None]
"""Called with the phase (fetch, train, encode or upload), the done and total amounts, and the loss."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks from a running app to the agent."""

    progress: Progress = lambda phase, done, total, loss: None
    should_stop: Callable[[], bool] = lambda: False
    now: Callable[[], float] = time.time
    """Returns the hub's time, which is written to signed manifests."""


_current: ContextVar[Hooks | None] = ContextVar("gym_client_hooks", default=None)


def current_hooks() -> Hooks:
    """Return the active hooks; no-op hooks if none are set."""
    return _current.get() or Hooks()


@contextmanager
def hooks_set(hooks: Hooks) -> Iterator[None]:
    """Activate the hooks inside the block."""
    token = _current.set(hooks)
    try:
        yield
    finally:
        _current.reset(token)


class TimeLimit:
    """Time limit of one task; it starts when the object is created.

    Args:
        policy: Policy with the limit ``max_seconds``.
        hooks: Hooks whose ``should_stop`` also ends the task.
    """

    def __init__(self, policy: Policy, hooks: Hooks) -> None:
        self._max_seconds, self._hooks = policy.max_seconds, hooks
        self._until = time.monotonic() + policy.max_seconds

    def is_over(self) -> bool:
        """Return True if the time limit is reached."""
        return time.monotonic() > self._until

    def require(self, phase: str) -> None:
        """Raise an error if the time limit is reached or the contributor wants to stop.

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
        """Create the error for a task that exceeded its time limit during ``phase``."""
        return GymError(
            ErrorCode.POLICY_REFUSED,
            f"the task exceeded max_seconds ({self._max_seconds:g} s) of this machine's policy during {phase}",
            "raise max_seconds in policy.yaml to allow it",
        )

    @contextmanager
    def bounding_steps(self) -> Iterator[None]:
        """Check the limit inside training steps of this thread, before the forward and backward pass of every module.

        The duration of a step grows with the recipe's batch and accumulation, so a check between steps is not enough.
        """
        import torch
        from torch.nn.modules import module as modules

        thread = threading.get_ident()

        def raise_when_over(*_: object) -> None:
            if self.is_over():
                raise self.error("training")

        def before_forward(*_: object) -> None:
            if threading.get_ident() == thread:
                raise_when_over()

        def after_forward(module: torch.nn.Module, inputs: object, output: object) -> None:
            if threading.get_ident() == thread and isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(raise_when_over)  # type: ignore[no-untyped-call]

        handles = [
            modules.register_module_forward_pre_hook(before_forward),
            modules.register_module_forward_hook(after_forward),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def bounding_templates(self) -> AbstractContextManager[None]:
        """Apply the limit to rendering rows with the base's chat template, inside the block."""
        return evaluation_deadline(self._until, self.error("preparation of the rows"))
