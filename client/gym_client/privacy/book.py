"""The privacy book: the privacy spending of each dataset over all hubs, in ``privacy.jsonl`` in the home.

A line is written durably before an update is signed, and nothing unsigned leaves this machine. The book therefore never
contains less than was spent. An update is charged once, even if it is sent repeatedly. Training that is lost in a crash
is not charged, since its noise is not in any sent update. After a crash between charge and signature, training resumes
from its last checkpoint and produces the same update, which is not charged again.

A dataset is identified by the digest of its file, so the same rows in another file are a separate entry. Training
outside of rounds (`gym train`) is not recorded.
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
    """The parameters of a private update, for computing its epsilon.

    Attributes:
        data: Digest of the data file.
        server: Id of the hub that the update is for.
        server_round: Round of the update.
        delta: SHA-256 of the update's file.
        noise_multiplier: Noise multiplier of every step.
        sampling_probability: Per-example sampling probability.
        steps: Number of private steps.
        target_delta: Delta at which epsilon is computed.
        at_seconds: Time of the charge in Unix seconds.
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
    """The privacy book of a home. Writers must hold the home's lock."""

    def __init__(self, home: Home) -> None:
        self.path: Path = home.folder / "privacy.jsonl"

    def charges(self) -> list[Charge]:
        """Read all charges, oldest first, skipping a last line that a crash has truncated.

        Raises:
            GymError: ``STATE_CORRUPT`` with the line number.
        """
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        charges = []
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                break
            try:
                charges.append(Charge(**json.loads(line)))
            except (ValueError, RecursionError, TypeError) as error:
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"{self.path}, line {number}: {error}",
                    "restore the file: without that line, the recorded privacy cost is too low",
                ) from error
        return charges

    def has(self, data: str, server: str, delta: str) -> bool:
        """Return True if the update was already charged."""
        return any((c.data, c.server, c.delta) == (data, server, delta) for c in self.charges())

    def charge(self, charge: Charge) -> None:
        """Record an update durably, unless it is already recorded."""
        if self.has(charge.data, charge.server, charge.delta):
            return
        drop_torn_line(self.path)
        append_lines(self.path, [json.dumps(asdict(charge), sort_keys=True)])

    def epsilon(self, data: str, *more: NoiseEvent, target_delta: float | None = None) -> float:
        """Return the epsilon of the data's examples over all hubs, including the additional events ``more``.

        The smallest ``target_delta`` of all charges is used, so that the value holds for each of them.
        """
        from gym_fed.privacy.accountant import epsilon

        own = [c for c in self.charges() if c.data == data]
        deltas = [c.target_delta for c in own] + ([] if target_delta is None else [target_delta])
        return epsilon([*(c.event() for c in own), *more], min(deltas)) if deltas else 0.0

    def summary(self) -> list[dict[str, Any]]:
        """Summarize the spending of each dataset, with its hubs."""
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
    """Return the Unix time rounded to seconds, the book's precision."""
    return float(int(time.time()))
