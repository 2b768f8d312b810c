"""What joining costs this machine, as the terms show it: the time of a round, and the bytes that come down."""

from __future__ import annotations

from dataclasses import dataclass

from gym_client.cli.round_time import RoundTime
from gym_client.hub.bandwidth import Bandwidth
from gym_fed.core.text import readable_bytes, readable_seconds


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

    def time_line(self, rounds: int | None) -> str:
        """How long the training takes here."""
        if self.round_seconds is None:
            return f"not measured: {self.measured}"
        each = f"about {readable_seconds(self.round_seconds)} of training each round"
        if self.total_seconds is not None and rounds is not None and rounds > 1:
            each += f", {readable_seconds(self.total_seconds)} in all"
        return f"{each} (measured here: {self.measured})"

    def base_in_words(self) -> str:
        """What the base cost."""
        if not self.base_bytes:
            return "nothing for the base model, which is here"
        return f"the base model's {readable_bytes(self.base_bytes)} are fetched"

    def download_time(self) -> str:
        """What all downloads take; empty where the bandwidth is not known."""
        if self.down_bytes_per_second is None:
            return ""
        pace = Bandwidth(self.down_bytes_per_second, self.bandwidth_known_by)
        return (
            f"{readable_bytes(self.total_download_bytes)} in all, {pace.duration(self.total_download_bytes)}"
        )
