"""The sum of a hub's soups on this machine, for versions whose soups are added as integers.

The folder contains ``<version>.gymdelta``, the sum of the additive soups up to this machine's last version. After a
download it also contains ``<version>-<version>.gymdelta``, the sum of the soups between two versions. A version is
named by the first 32 hex digits of its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.config.hub.task import SoupReference, first_summed
from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.integer_sum import IntegerSum

_SUFFIX = ".gymdelta"


class VersionSum:
    """The stored sum of one hub's soups.

    Args:
        folder: The folder that contains the sum.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def combined(self, start: str, end: str) -> Path:
        """Return the path of the summed soups between two versions, given by digest."""
        return self._folder / f"{_short(start)}-{_short(end)}{_SUFFIX}"

    def drop_combined(self) -> None:
        """Delete the summed soups of earlier tasks, which the hub took back before they were added."""
        for path in self._folder.glob(f"*-*{_SUFFIX}"):
            path.unlink(missing_ok=True)

    def missing(self, soups: Sequence[SoupReference], base: str) -> tuple[str, str]:
        """Return the digests of the versions between which soups must be fetched; they are equal if none are missing.

        Args:
            soups: Soups from the base to a version; the additive ones are last.
            base: Digest of the base.
        """
        parents = [base, *(soup.version_digest for soup in soups)]
        summed, held, end = first_summed(soups), self._held(soups), parents[-1]
        starts = [parents[at] for at in (held, summed) if at is not None]
        done = starts[0] == end or any(self.combined(start, end).exists() for start in starts)
        return (end, end) if done else (starts[0], end)

    def advance(
        self, soups: Sequence[SoupReference], specs: Sequence[BaseSpec], path_of: Callable[[str], Path]
    ) -> IntegerSum:
        """Add the missing soups to the sum and return it.

        Args:
            soups: Soups from the base to the version; the additive ones are last.
            specs: Spec of the base, and of the version after each soup.
            path_of: Returns the file of a soup by its sha256; used for soups that were not fetched as one sum.

        Raises:
            GymError: ``DELTA_INVALID``; ``BASE_MISMATCH`` if the soups do not lead to the version. The sum and the
                downloaded soups are then deleted.
        """
        from gym_fed.delta.integer_sum import read_sum

        summed, held = first_summed(soups), self._held(soups)
        target = self.path(soups[-1].version_digest)
        at = summed if held is None else held
        combined = {start: self.combined(specs[start].digest, specs[-1].digest) for start in (at, summed)}
        if held == len(soups):
            files = []
        elif (start := next((start for start, path in combined.items() if path.exists()), None)) is not None:
            at, files = start, [(combined[start], specs[start])]
        else:
            files = [(path_of(soup.sha256), specs[at + i]) for i, soup in enumerate(soups[at:])]
        if held is not None and at == held:
            files.insert(0, (self.path(soups[held - 1].version_digest), specs[summed]))
        try:
            total = read_sum(files, str(soups[-1].integers))
        except GymError as error:
            if error.code in (ErrorCode.DELTA_INVALID, ErrorCode.BASE_MISMATCH):
                for path, _ in files:
                    path.unlink(missing_ok=True)
            raise
        if held != len(soups):
            total.write(target, specs[summed])
        for path in {*self._folder.iterdir(), *(path for path, _ in files)} - {target}:
            path.unlink(missing_ok=True)
        return total

    def _held(self, soups: Sequence[SoupReference]) -> int | None:
        """Return the number of soups up to the version of the stored sum; None if no stored sum matches."""
        for at in range(len(soups), first_summed(soups), -1):
            if self.path(soups[at - 1].version_digest).exists():
                return at
        return None

    def path(self, version: str) -> Path:
        """Return the file of a version's sum; the version is given by digest."""
        return self._folder / f"{_short(version)}{_SUFFIX}"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:32]
