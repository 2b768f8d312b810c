"""Two-phase error feedback: encoding errors of an update are carried over only after the hub has merged it.

``residuals/<server>/`` contains ``residual.safetensors`` (committed), ``round`` (the round of its update) and a
``<update digest>.staged`` for every update without a verdict.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_client.identity.home import Home
from gym_fed.core.files import fsync_folder, move_file, write_atomically
from gym_fed.core.text import whole_number

if TYPE_CHECKING:
    from gym_fed.delta.feedback import ErrorFeedback

_SUFFIX = ".staged"
_ACCEPTED = ("merged", "duplicate")
"""Verdicts after which the residual is kept. For a duplicate an equal update was merged in its place."""
_OPEN = "admitted"


class Residuals:
    """The residuals kept for one hub."""

    def __init__(self, home: Home, server: str) -> None:
        self.folder = home.residuals(server)

    def load(self, lineage: str, rounds: Iterable[int | None] = (None,)) -> ErrorFeedback:
        """Return the committed residual, initially zero; see ``ErrorFeedback.load``.

        Args:
            lineage: Digest of the federation's base.
            rounds: Rounds that created the versions up to the task's; includes None if some are unknown. A residual of
                a different round belongs to a version that was rolled back, and is discarded.
        """
        from gym_fed.delta.feedback import ErrorFeedback

        known = set(rounds)
        if None not in known and self._round() not in {None, *known}:
            self._committed.unlink(missing_ok=True)
            self._round_path.unlink(missing_ok=True)
            fsync_folder(self.folder)
        return ErrorFeedback.load(self._committed, lineage)

    def stage(self, residual: Path, update: str) -> None:
        """Store the residual of a sent update until its verdict."""
        if residual.exists():
            move_file(residual, self.folder / f"{update}{_SUFFIX}")
            fsync_folder(self.folder)

    def accept(self, update: str, server_round: int | None = None) -> None:
        """Commit a staged residual; None for a round whose outcome is unknown."""
        if server_round is None:
            self._round_path.unlink(missing_ok=True)
        else:
            write_atomically(self._round_path, str(server_round).encode())
        os.replace(self.folder / f"{update}{_SUFFIX}", self._committed)
        fsync_folder(self.folder)

    def staged(self) -> list[str]:
        """Return the digests of updates that wait for a verdict."""
        return sorted(path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}"))

    def settle(self, verdicts: Iterable[dict[str, Any]]) -> dict[str, str]:
        """Commit or discard residuals according to verdicts.

        Args:
            verdicts: The hub's verdicts, newest first; of several merged updates, the newest one's residual is kept.

        Returns:
            Digest and verdict of each settled update.
        """
        waiting, settled, has_newest = set(self.staged()), {}, False
        for verdict in verdicts:
            update, word = str(verdict.get("update", "")), str(verdict.get("verdict", ""))
            if update not in waiting or word in ("", _OPEN):
                continue
            if word in _ACCEPTED and not has_newest:
                self.accept(update, verdict.get("server_round"))
                has_newest = True
            else:
                (self.folder / f"{update}{_SUFFIX}").unlink()
            settled[update] = word
        return settled

    def _round(self) -> int | None:
        """Return the round of the committed residual's update; None if unknown."""
        if not self._round_path.exists():
            return None
        return whole_number(self._round_path.read_text(encoding="ascii", errors="replace"))

    @property
    def _round_path(self) -> Path:
        return self.folder / "round"

    @property
    def _committed(self) -> Path:
        return self.folder / "residual.safetensors"
