"""What leaves this machine in a round that aggregates securely, told before joining."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_client import from_hub
from gym_fed.errors import ErrorCode, GymError
from gym_fed.privacy.secure_aggregation.messages import MAX_CONTRIBUTORS

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec

_PER_CONTRIBUTOR_BYTES = 1000
"""Sealed shares, what is promised of them, and shares that are revealed, for one other contributor; rounded up."""


@dataclass(frozen=True)
class SecureTerms:
    """A hub's secure rounds.

    Attributes:
        threshold: Contributors that must stay to the end, as the hub announces it.
    """

    threshold: int

    @classmethod
    def parse(cls, text: str) -> SecureTerms | None:
        """From ``StatusReply.privacy_json``; None for a hub that sees every update.

        Raises:
            GymError: ``POLICY_REFUSED`` for a hub that does not say its threshold.
        """
        promised = from_hub.document(text, "a promise of privacy", ErrorCode.POLICY_REFUSED) if text else None
        told = promised.get("secure_aggregation") if isinstance(promised, dict) else None
        if not told:
            return None
        threshold = told.get("threshold") if isinstance(told, dict) else None
        if not isinstance(threshold, int) or not 2 <= threshold <= MAX_CONTRIBUTORS // 2:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                "the server says that it aggregates securely, and not with which threshold",
                "update gym-fed, or tell the coordinator",
            )
        return cls(threshold)

    @property
    def most(self) -> int:
        """Contributors of a round, at most: with more, a hub could split them in two; see ``check_majority``."""
        return 2 * self.threshold - 1

    def update_bytes(self, base: BaseSpec) -> int:
        """Size of the masked votes when so many take part; fewer send as much or less."""
        from gym_fed.privacy.secure_aggregation.votes import bits_for, masked_bytes

        return masked_bytes(base, bits_for(self.most))

    @property
    def message_bytes(self) -> int:
        """Size of all other messages of a round, at most."""
        return _PER_CONTRIBUTOR_BYTES * self.most
