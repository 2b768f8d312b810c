"""How often each file was used lately, those that are not in memory any more too. Not for several threads at once.

Counts are halved every so many uses, as TinyLFU ages its own (Einziger, Friedman and Manes 2017, section 3.3): what was
popular once makes room in the end.
"""

from __future__ import annotations

_USES_A_FILE = 10
"""Between two halvings, for each file that is in memory."""
_FEWEST_USES = 1000


class UseCounts:
    """Aged counts by digest."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._since = 0

    def __getitem__(self, digest: str) -> float:
        return self._counts.get(digest, 0.0)

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, digest: str, in_memory: int) -> None:
        """One use; ``in_memory`` files are there now."""
        self._counts[digest] = self[digest] + 1
        self._since += 1
        if self._since >= max(_FEWEST_USES, _USES_A_FILE * in_memory):
            self._since = 0
            self._counts = {one: count / 2 for one, count in self._counts.items() if count >= 1}
