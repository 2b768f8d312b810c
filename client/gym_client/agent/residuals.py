"""State that a contributor keeps between rounds: staged when an update is sent, committed when the hub merges it.

``residuals/<server>/`` contains the committed files: the encoding error ``residual.safetensors``, AdamW's
``moments.safetensors``, and the rounds of their updates (``round``, ``moments.round``). For every update without a
verdict, it contains ``<update digest>.staged`` and ``<update digest>.moments``, or an empty ``<update digest>.sent`` if
the update has neither.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_client.identity.home import Home
from gym_fed.core.files import fsync_folder, move_file, write_atomically
from gym_fed.core.text import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.delta.feedback import ErrorFeedback

_SUFFIX, _MOMENTS, _SENT = ".staged", ".moments", ".sent"
_WAITING = (_SUFFIX, _MOMENTS, _SENT)
_ACCEPTED = ("merged", "duplicate")
"""Verdicts after which the residual is committed. ``duplicate`` means that an equal update was merged instead."""
_OPEN = "admitted"
MAX_WAITING = 8
"""Maximum number of updates without a verdict whose residual and moments are kept, since a hub may never judge any."""


class Residuals:
    """The residual and moments kept for one hub."""

    def __init__(self, home: Home, server: str) -> None:
        self.folder = home.residuals(server)

    def load(self, lineage: str, rounds: Iterable[int | None] = (None,)) -> ErrorFeedback:
        """Return the committed residual, which is zero at first; see ``ErrorFeedback.load``.

        Args:
            lineage: Digest of the federation's base.
            rounds: Rounds that created the versions up to the task's; contains None if some are unknown. A residual of
                any other round belongs to a rolled-back version. It is discarded, together with the moments.
        """
        from gym_fed.delta.feedback import ErrorFeedback

        self._drop_rolled_back(rounds)
        return ErrorFeedback.load(self._committed[_SUFFIX], lineage)

    def moments(self, lineage: str, rounds: Iterable[int | None] = (None,)) -> dict[str, Tensor]:
        """Return the committed moments of ``KeptMoments``, empty at first. Arguments as for ``load``."""
        from gym_fed.delta.feedback import ErrorFeedback

        self._drop_rolled_back(rounds)
        file = ErrorFeedback.load(self._committed[_MOMENTS], lineage)
        return {name: tensor for name in file.names() if (tensor := file.residual(name)) is not None}

    def stage(self, residual: Path, update: str, moments: Path | None = None) -> list[str]:
        """Store the residual and moments of a sent update until its verdict; missing files are skipped.

        An update with neither is recorded too: once it is merged, older moments must not be used any more.

        Returns:
            Digests of the oldest updates whose files were deleted because more than ``MAX_WAITING`` have no verdict.
        """
        for path, suffix in ((residual, _SUFFIX), (moments, _MOMENTS)):
            if path is not None and path.exists():
                move_file(path, self.folder / f"{update}{suffix}")
        if update not in self.staged():
            (self.folder / f"{update}{_SENT}").touch()
        dropped = self._drop_oldest(update)
        fsync_folder(self.folder)
        return dropped

    def _drop_oldest(self, newest: str) -> list[str]:
        """Delete the files of the oldest updates over ``MAX_WAITING``, which then count as sent without any."""
        ages: dict[str, float] = {}
        for suffix in (_SUFFIX, _MOMENTS):
            ages |= {path.stem: path.stat().st_mtime for path in self.folder.glob(f"*{suffix}")}
        old = sorted(ages.keys() - {newest}, key=ages.__getitem__, reverse=True)[MAX_WAITING - 1 :]
        for update in old:
            (self.folder / f"{update}{_SENT}").touch()
            for suffix in (_SUFFIX, _MOMENTS):
                (self.folder / f"{update}{suffix}").unlink(missing_ok=True)
        return sorted(old)

    def accept(self, update: str, server_round: int | None = None) -> None:
        """Commit the staged files of a merged update. ``server_round`` is None if unknown.

        Without a staged residual, the committed one is kept. Without staged moments, the committed ones are deleted.
        """
        for suffix, committed in self._committed.items():
            if (staged := self.folder / f"{update}{suffix}").exists():
                if server_round is None:
                    self._round_path(suffix).unlink(missing_ok=True)
                else:
                    write_atomically(self._round_path(suffix), str(server_round).encode())
                os.replace(staged, committed)
            elif suffix == _MOMENTS:
                self._drop(suffix)
        (self.folder / f"{update}{_SENT}").unlink(missing_ok=True)
        fsync_folder(self.folder)

    def delete(self) -> None:
        """Delete everything that is stored for this hub."""
        shutil.rmtree(self.folder)

    def staged(self) -> list[str]:
        """Return the digests of the updates that are waiting for a verdict."""
        return sorted({path.stem for suffix in _WAITING for path in self.folder.glob(f"*{suffix}")})

    def settle(self, verdicts: Iterable[dict[str, Any]]) -> dict[str, str]:
        """Commit or discard residuals according to verdicts.

        Only verdicts on updates sent from this home are used, since other homes may have the same key.

        Args:
            verdicts: The hub's verdicts, newest first. Of several merged updates, the residual of the newest is kept.

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
                for suffix in _WAITING:
                    (self.folder / f"{update}{suffix}").unlink(missing_ok=True)
            settled[update] = word
        return settled

    def _drop_rolled_back(self, rounds: Iterable[int | None]) -> None:
        """Discard the committed files whose round is not in ``rounds``."""
        known = set(rounds)
        for suffix in self._committed:
            if None not in known and self._round(suffix) not in {None, *known}:
                self._drop(suffix)

    def _drop(self, suffix: str) -> None:
        """Delete a committed file and its round."""
        for path in (self._committed[suffix], self._round_path(suffix)):
            path.unlink(missing_ok=True)
        fsync_folder(self.folder)

    def _round(self, suffix: str) -> int | None:
        """Return the round of a committed file; None if it is unknown."""
        path = self._round_path(suffix)
        if not path.exists():
            return None
        return whole_number(path.read_text(encoding="ascii", errors="replace"))

    def _round_path(self, suffix: str) -> Path:
        return self.folder / ("moments.round" if suffix == _MOMENTS else "round")

    @property
    def _committed(self) -> dict[str, Path]:
        """The names of the committed files, by the suffix of the staged file."""
        return {
            _SUFFIX: self.folder / "residual.safetensors",
            _MOMENTS: self.folder / "moments.safetensors",
        }
