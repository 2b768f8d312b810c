"""Two-phase error feedback: what an update's encoding lost counts only once the hub has merged that update.

``residuals/<server>/`` holds ``residual.safetensors`` (committed) and one ``<update digest>.staged`` for
every update whose verdict is still open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_client.identity.home import Home
from gym_fed.files import fsync_folder

if TYPE_CHECKING:
    from gym_fed.delta.feedback import ErrorFeedback

_SUFFIX = ".staged"
_ACCEPTED = "merged"
_OPEN = "admitted"


class Residuals:
    """The residuals kept for one hub."""

    def __init__(self, home: Home, server: str) -> None:
        self.folder = home.residuals(server)

    def load(self, lineage: str) -> ErrorFeedback:
        """The committed residual, zero at first; see ``ErrorFeedback.load``."""
        from gym_fed.delta.feedback import ErrorFeedback

        return ErrorFeedback.load(self._committed, lineage)

    def stage(self, residual: Path, update: str) -> None:
        """Take over the residual of an update that was sent; its verdict decides what becomes of it."""
        if residual.exists():
            os.replace(residual, self.folder / f"{update}{_SUFFIX}")
            fsync_folder(self.folder)

    def accept(self, update: str) -> None:
        """Commit a staged residual."""
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
        waiting, settled, kept = set(self.staged()), {}, False
        for verdict in verdicts:
            update, word = str(verdict.get("update", "")), str(verdict.get("verdict", ""))
            if update not in waiting or word in ("", _OPEN):
                continue
            if word == _ACCEPTED and not kept:
                self.accept(update)
                kept = True
            else:
                (self.folder / f"{update}{_SUFFIX}").unlink()
            settled[update] = word
        return settled

    @property
    def _committed(self) -> Path:
        return self.folder / "residual.safetensors"
