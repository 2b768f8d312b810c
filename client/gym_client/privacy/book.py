"""The privacy book: what the examples of each data set have spent at all hubs, in ``privacy.jsonl`` in the home.

A line is written durably before an update is signed, and nothing unsigned leaves this machine, so the book never
contains less than was spent. An update is charged once, however often it is sent. Training undone by a crash is not
charged, since its noise is in nothing that was sent. After a crash between charge and signature, training resumes
from its last checkpoint to the same update, which is not charged again.

Data is identified by the digest of its file: the same rows in another file have a line of their own. Training outside
of rounds (`gym train`) is not in the book.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines, drop_torn_line

if TYPE_CHECKING:
    from gym_client.identity.home import Home
    from gym_fed.privacy.accountant import NoiseEvent


@dataclass(frozen=True)
class Charge:
    """A private update and its parameters.

    Attributes:
        data: Digest of the data.
        server: Id of the hub that it was made for.
        server_round: The hub's round.
        delta: sha256 of the update's file.
        noise_multiplier: The noise multiplier of every step.
        sampling_probability: Per-example sampling probability.
        steps: The number of steps.
        target_delta: The delta of the recipe's epsilon.
        at_seconds: Unix time.
    """

    data: str
    server: str
    server_round: int
    delta: str
    noise_multiplier: float
    sampling_probability: float
    steps: int
    target_delta: float
    at_seconds: float

    def event(self) -> NoiseEvent:
        """Convert to the accountant's event."""
        from gym_fed.privacy.accountant import NoiseEvent

        return NoiseEvent(
            noise_multiplier=self.noise_multiplier,
            sampling_probability=self.sampling_probability,
            count=self.steps,
        )


class PrivacyBook:
    """The privacy book of a home; writers hold the home's lock."""

    def __init__(self, home: Home) -> None:
        self.path: Path = home.folder / "privacy.jsonl"

    def charges(self) -> list[Charge]:
        """Read all charges, oldest first, without a last line truncated by a crash, which nothing relied on.

        Raises:
            GymError: ``STATE_CORRUPT`` naming the line.
        """
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        charges = []
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                break
            try:
                charges.append(Charge(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"{self.path}, line {number}: {error}",
                    "restore the file: without the line more would be spent than the book says",
                ) from error
        return charges

    def has(self, data: str, server: str, delta: str) -> bool:
        """Return True if an update was charged."""
        return any((c.data, c.server, c.delta) == (data, server, delta) for c in self.charges())

    def charge(self, charge: Charge) -> None:
        """Record an update durably, unless it is there already."""
        if self.has(charge.data, charge.server, charge.delta):
            return
        drop_torn_line(self.path)
        append_lines(self.path, [json.dumps(asdict(charge), sort_keys=True)])

    def epsilon(self, data: str, *more: NoiseEvent, target_delta: float | None = None) -> float:
        """Return the epsilon of ``data``'s examples over all hubs, including the events in ``more``.

        The value is for the smallest ``target_delta`` of all charges, so that it holds for each of them.
        """
        from gym_fed.privacy.accountant import epsilon

        own = [c for c in self.charges() if c.data == data]
        deltas = [c.target_delta for c in own] + ([] if target_delta is None else [target_delta])
        return epsilon([*(c.event() for c in own), *more], min(deltas)) if deltas else 0.0

    def summary(self) -> list[dict[str, Any]]:
        """Summarize each data set with its hubs."""
        from gym_fed.privacy.accountant import epsilon

        charges = self.charges()
        rows = []
        for data in dict.fromkeys(c.data for c in charges):
            own = [c for c in charges if c.data == data]
            target_delta = min(c.target_delta for c in own)
            hubs = {}
            for server in dict.fromkeys(c.server for c in own):
                there = [c for c in own if c.server == server]
                hubs[server] = {
                    "epsilon": epsilon([c.event() for c in there], target_delta),
                    "updates": len(there),
                    "steps": sum(c.steps for c in there),
                }
            total = epsilon([c.event() for c in own], target_delta)
            rows.append({"data": data, "epsilon": total, "target_delta": target_delta, "hubs": hubs})
        return rows


def now() -> float:
    """Return Unix time in whole seconds, since the record needs no more precision."""
    return float(int(time.time()))
