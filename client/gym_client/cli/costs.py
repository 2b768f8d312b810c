"""What joining costs this machine, as the terms show it: the time of a round, and the bytes that come down."""

from __future__ import annotations

from dataclasses import dataclass

from gym_client.cli.round_time import RoundTime
from gym_client.hub.backoff import readable_seconds
from gym_client.hub.bandwidth import Bandwidth
from gym_fed.text import counted, readable_bytes


@dataclass(frozen=True)
class Costs:
    """Measured or stated; no part of what a yes by name is to, for it changes from run to run.

    Attributes:
        round_seconds: Training of one round; None where it could not be measured.
        total_seconds: Of all rounds to come; None where their number is not known.
        measured: What was timed, or why nothing was.
        base_bytes: Of the base model, fetched to show these terms; 0 where it was on this machine.
        total_download_bytes: Base, soups to join, and soups of all rounds to come.
        down_bytes_per_second: None where nothing is known.
        bandwidth_known_by: How that is known.
    """

    round_seconds: float | None
    total_seconds: float | None
    measured: str
    base_bytes: int
    total_download_bytes: int
    down_bytes_per_second: float | None
    bandwidth_known_by: str

    @classmethod
    def of(
        cls,
        time: RoundTime,
        rounds: int | None,
        base_bytes: int,
        soup_bytes: int,
        bandwidth: Bandwidth | None,
    ) -> Costs:
        """Sums of what is known.

        Args:
            time: Of one round.
            rounds: How many are to come; None where nobody knows.
            base_bytes: Fetched in this run.
            soup_bytes: To join, and for the rounds to come.
            bandwidth: Of downloads.
        """
        total = None if time.seconds is None or rounds is None else time.seconds * rounds
        return cls(
            round_seconds=time.seconds,
            total_seconds=total,
            measured=time.measured,
            base_bytes=base_bytes,
            total_download_bytes=base_bytes + soup_bytes,
            down_bytes_per_second=bandwidth.bytes_per_second if bandwidth else None,
            bandwidth_known_by=bandwidth.known_by if bandwidth else "",
        )

    def time_lines(self, rounds: int | None) -> list[str]:
        """How long the training takes here."""
        if self.round_seconds is None:
            return [f"not measured: {self.measured}"]
        lines = [
            f"about {readable_seconds(self.round_seconds)} of training each round, measured here: {self.measured}"
        ]
        if self.total_seconds is not None and rounds is not None and rounds > 1:
            lines.append(f"{counted(rounds, 'round')}: about {readable_seconds(self.total_seconds)}")
        return lines

    def download_lines(self) -> list[str]:
        """What the base cost, and what all downloads come to."""
        base = (
            f"{readable_bytes(self.base_bytes)} for the base model, fetched already"
            if self.base_bytes
            else "nothing for the base model: it is on this machine"
        )
        total = f"in all about {readable_bytes(self.total_download_bytes)} down"
        if self.down_bytes_per_second is not None:
            pace = Bandwidth(self.down_bytes_per_second, self.bandwidth_known_by)
            total = f"{total}: {pace.duration(self.total_download_bytes)}"
        return [base, total]
