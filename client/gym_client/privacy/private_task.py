"""Tasks under ``recipe.privacy``: check the budget before training, and charge the update before signing.

Only data derived from the private weights leaves this machine: neither the loss nor the number of examples or tokens is
sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gym_client.agent.data import Data
from gym_client.agent.policy import Policy
from gym_client.agent.tasks import TaskFolder, Trained
from gym_client.display import Display
from gym_client.identity.home import Home
from gym_client.privacy.book import PrivacyBook
from gym_client.privacy.terms import charge_for, planned, require_within_budget
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import write_atomically

if TYPE_CHECKING:
    from gym_fed.training.run.result import TrainResult

_METRICS = ("update_norm", "num_steps")
"""Metrics that are derived from private weights or chosen by the hub."""


class PrivateTask:
    """The privacy accounting of one task on this machine."""

    def __init__(self, spec: TaskSpec, data: Data, folder: TaskFolder, book: PrivacyBook) -> None:
        self._spec, self._data, self._folder, self._book = spec, data, folder, book
        self._marker = folder.path / "charged"

    def require_within_budget(self, policy: Policy) -> None:
        """Check the budget, unless the round was already charged before a crash.

        Raises:
            GymError: ``POLICY_REFUSED`` if the budget would be exceeded.
        """
        if not self._marker.exists():
            plan = planned(self._spec.recipe, len(self._data.rows))
            require_within_budget(policy, self._book, self._data.digest, plan)

    def charged(self, trained: Trained, result: TrainResult) -> Trained:
        """Charge the update to the book, and return it without data-dependent metadata, ready for signing."""
        if result.privacy is None:
            raise GymError(ErrorCode.INTERNAL, "the task requires privacy, but the training was not private")
        self._book.charge(
            charge_for(
                result.privacy,
                result.steps,
                data=self._data.digest,
                server=self._spec.server,
                server_round=self._spec.server_round,
                delta=trained.sha256,
            )
        )
        write_atomically(self._marker, trained.sha256.encode())
        failpoint("client-charged")
        metrics = {name: trained.metrics[name] for name in _METRICS}
        return replace(trained, num_examples=1, metrics=metrics)


def kept_here() -> GymError:
    """Create the only error that a hub receives for a failed private task.

    Messages may contain rows, their number or the budget. Even an error code could reveal the length of a row.
    """
    return GymError(
        ErrorCode.POLICY_REFUSED, "the reason stays with the contributor, because the task is private"
    )


class Spending:
    """Reports the privacy cost of a round and the total spending of its data."""

    def __init__(self, home: Home) -> None:
        self._book = PrivacyBook(home)
        self._reported = len(self._book.charges())

    def report(self, display: Display) -> None:
        """Report the newest update, unless it was already reported."""
        charges = self._book.charges()
        if len(charges) == self._reported:
            return
        from gym_fed.privacy.accountant import epsilon

        self._reported, last = len(charges), charges[-1]
        cost, total = epsilon([last.event()], last.target_delta), self._book.epsilon(last.data)
        text = f"privacy: epsilon {cost:.2f} for this round, {total:.2f} for this data so far"
        fields = {"epsilon": cost, "epsilon_total": total, "target_delta": last.target_delta}
        display.report("privacy", f"{text} (delta {last.target_delta:g})", **fields)
