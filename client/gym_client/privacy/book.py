"""What each of this machine's data sets has cost its examples, over all hubs: ``privacy.jsonl`` in the home.

A line is written, and is on the disk, before an update is signed; nothing unsigned leaves this machine, so the book
never holds less than what was given away. An update is charged once, however often it is sent. Training that a crash
undid is not charged: its noise is in nothing that was given away. Where a crash falls between charge and signature,
training goes on from its last checkpoint to the same update, which is not charged again.

Data is known by the digest of its file: the same rows in another file have a line of their own, and what is trained
outside of rounds (`gym train`) is not in the book.
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
    """One update that was trained privately.

    Attributes:
        data: Digest of the data.
        server: Id of the hub that it was made for.
        server_round: Its round there.
        delta: sha256 of the update's file.
        noise_multiplier: Of every step.
        sampling_probability: With which an example was in a step.
        steps: How many.
        target_delta: At which the recipe states its epsilon.
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
        """For the accountant."""
        from gym_fed.privacy.accountant import NoiseEvent

        return NoiseEvent(
            noise_multiplier=self.noise_multiplier,
            sampling_probability=self.sampling_probability,
            count=self.steps,
        )


class PrivacyBook:
    """The book of one home; a writer holds the home's lock."""

    def __init__(self, home: Home) -> None:
        self.path: Path = home.folder / "privacy.jsonl"

    def charges(self) -> list[Charge]:
        """All of them, oldest first. The end of a line that a crash cut short was never relied upon, and is left out.

        Raises:
            GymError: ``STATE_CORRUPT`` naming the line.
        """
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        found = []
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                break
            try:
                found.append(Charge(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"{self.path}, line {number}: {error}",
                    "restore the file: without the line more would be spent than the book says",
                ) from error
        return found

    def has(self, data: str, server: str, delta: str) -> bool:
        """Whether an update is in the book."""
        return any((c.data, c.server, c.delta) == (data, server, delta) for c in self.charges())

    def charge(self, charge: Charge) -> None:
        """Write an update down, durably; one that is there already is left alone."""
        if self.has(charge.data, charge.server, charge.delta):
            return
        drop_torn_line(self.path)
        append_lines(self.path, [json.dumps(asdict(charge), sort_keys=True)])

    def epsilon(self, data: str, *more: NoiseEvent, target_delta: float | None = None) -> float:
        """What the examples of ``data`` have spent at all hubs together, and what they would have with ``more``.

        At the smallest ``target_delta`` of all, so that it holds for each of them.
        """
        from gym_fed.privacy.accountant import epsilon

        own = [c for c in self.charges() if c.data == data]
        deltas = [c.target_delta for c in own] + ([] if target_delta is None else [target_delta])
        return epsilon([*(c.event() for c in own), *more], min(deltas)) if deltas else 0.0

    def summary(self) -> list[dict[str, Any]]:
        """A row for each data set, with its hubs."""
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
    """Unix time to the second: what is written down says no more than it must."""
    return float(int(time.time()))
