"""Durations and refusals of calls, as measured by the callers."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Calls:
    """Durations by method, and refusals of honest and of malicious members by method and code."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused_malicious: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __len__(self) -> int:
        return sum(map(len, self.seconds.values()))

    def quantile(self, method: str, share: float) -> float:
        """Return a quantile of a method's durations, in seconds; 0 if it was never called."""
        found = sorted(self.seconds.get(method, []))
        return found[min(len(found) - 1, int(share * len(found)))] if found else 0.0

    def worst(self, share: float) -> float:
        """Return the largest quantile over all methods."""
        return max((self.quantile(method, share) for method in self.seconds), default=0.0)

    def taken(self) -> Calls:
        """Return the calls so far, and reset the counters."""
        before = Calls(self.seconds, self.refused, self.refused_malicious)
        empty = Calls()
        self.seconds, self.refused, self.refused_malicious = (
            empty.seconds,
            empty.refused,
            empty.refused_malicious,
        )
        return before

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return table rows of method, number of calls, and median, p99 and maximum duration in seconds."""
        return [
            (
                method,
                f"{len(found):,}",
                f"{statistics.median(found):.3f}",
                f"{self.quantile(method, 0.99):.3f}",
                f"{max(found):.3f}",
            )
            for method, found in sorted(self.seconds.items())
        ]
