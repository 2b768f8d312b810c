"""Two-phase error feedback: what an update's encoding lost counts only once the hub has merged that update.

``residuals/<server>/`` contains ``residual.safetensors`` (committed), ``round`` (of its update) and one ``<update
digest>.staged`` for every update without a verdict.
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
        """The committed residual, zero at first; see ``ErrorFeedback.load``.

        Args:
            lineage: Digest of the federation's base.
            rounds: That made the versions which lead to the task's; None among them: some are not known. A residual of
                another round is of a version that the coordinator went back from, and is forgotten.
        """
        from gym_fed.delta.feedback import ErrorFeedback

        known = set(rounds)
        if None not in known and self._round() not in {None, *known}:
            self._committed.unlink(missing_ok=True)
            self._round_path.unlink(missing_ok=True)
            fsync_folder(self.folder)
        return ErrorFeedback.load(self._committed, lineage)

    def stage(self, residual: Path, update: str) -> None:
        """Take over the residual of an update that was sent; its verdict decides what becomes of it."""
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
        """Digests of the updates that wait for their verdict."""
        return sorted(path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}"))

    def settle(self, verdicts: Iterable[dict[str, Any]]) -> dict[str, str]:
        """Commit or discard what verdicts have been spoken on.

        Args:
            verdicts: The hub's, newest first; of several merged updates the newest one's residual stays.

        Returns:
            Digest and verdict of each update that was settled.
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
        """Of the update that the committed residual is from; None where nothing says it."""
        if not self._round_path.exists():
            return None
        return whole_number(self._round_path.read_text(encoding="ascii", errors="replace"))

    @property
    def _round_path(self) -> Path:
        return self.folder / "round"

    @property
    def _committed(self) -> Path:
        return self.folder / "residual.safetensors"
