"""The verdicts and the soup of a round, in the form in which they are committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection


@dataclass(frozen=True)
class Judgement:
    """The final verdict on one update of a round."""

    update_id: str
    contributor: str
    verdict: str  # merged | duplicate | rejected
    reason: str
    credit: int = 0
    heldout_change: float | None = None
    cheating: bool = False
    """True if the reason for rejection can only result from cheating."""
    score: float | None = None
    """The measured contribution in nats of held-out loss; None if it was not measured."""
    error: float | None = None
    """The standard error of ``score``; None if it is unknown."""


@dataclass(frozen=True)
class SoupRecord:
    """The result of a round, in the form in which it is committed."""

    sha256: str
    size_bytes: int
    recipe: dict[str, Any]
    heldout_before: float | None
    heldout_after: float | None
    residual: str | None
    root: str | None = None
    judgements: Sequence[Judgement] = field(default_factory=list)
    state: Mapping[str, str] = field(default_factory=dict)
    """sha256 of each state file that the round passes to the next one, by kind."""
    weights: Mapping[str, float] | None = None
    """Weight of each merged update from reputations; None if the recipe sets the weights."""
    also: Sequence[Callable[[Connection, int], object]] = ()
    """Functions called with the version's height in the commit's transaction, before credits are written."""
    privacy: Mapping[str, Any] | None = None
    """Parameters of the private merge, for the version's entry."""
    secure: Mapping[str, Any] | None = None
    """Parameters of the secure sum of masked votes, for the version's entry."""
    evidence: Mapping[str, Any] | None = None
    """Verdicts on the updates' lengths, the soup's length and the digest of the rows, for the version's entry."""
    window: Mapping[str, Any] | None = None
    """The window of a continuous round, for the version's entry."""
    plugins: Sequence[Mapping[str, Any]] = ()
    """Plug-ins that the merge used, for the version's entry."""
    integers: Mapping[str, Any] | None = None
    """``digest``, ``sum`` and ``sum_bytes`` of the version's integer sum; None if its soup is not additive."""

    def entry_fields(self) -> dict[str, Any]:
        """Return the fields of the version's ledger entry, without those of absent parts."""
        made: dict[str, Any] = {
            "soup": self.sha256,
            "soup_bytes": self.size_bytes,
            "recipe": self.recipe,
            "root": self.root,
            "state": dict(self.state),
        }
        parts = {
            "privacy": self.privacy,
            "secure_aggregation": self.secure,
            "weights": self.weights,
            "evidence": self.evidence,
            "window": self.window,
            "integers": self.integers,
        }
        made |= {key: dict(fields) for key, fields in parts.items() if fields is not None}
        if self.plugins:
            made["plugins"] = [dict(record) for record in self.plugins]
        return made
