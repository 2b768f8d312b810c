"""Who asks, and which models are theirs to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Owned(Protocol):
    """What access looks at of a registered variant."""

    @property
    def name(self) -> str: ...

    @property
    def owner(self) -> str: ...


@dataclass(frozen=True)
class Caller:
    """One user of the service.

    Attributes:
        name: For the usage log and the queue, which is fair between names.
        base: Whether the base itself may be used.
        everything: Whether all variants may.
        variants: Names of variants that may.
        owners: Accounts all of whose variants may.
        metrics: Whether the server's metrics may be read, which tell of everybody's requests.
    """

    name: str
    base: bool = True
    everything: bool = False
    variants: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()
    metrics: bool = False

    def may_use(self, variant: Owned) -> bool:
        return self.everything or variant.name in self.variants or variant.owner in self.owners


LOCAL = Caller("local", everything=True, metrics=True)
"""Whoever is on this machine, where no API keys are set."""
