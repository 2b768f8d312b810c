"""Bases that were fetched, in the home: a folder each, named by digest, whole or not there.

bases/<digest>/            all files, checked: their tensors have the digest
bases/<digest>.partial/    files that have come, and <sha256>.part of the one that is coming
bases/<digest>.folder      path of a base that the Hugging Face cache holds
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gym_client.base.offer import require_digest
from gym_client.identity.home import Home
from gym_fed.core.files import fsync_folder, make_folder, write_atomically


class BaseStore:
    """The bases of one home. The caller holds the home's lock."""

    def __init__(self, home: Home) -> None:
        self._folder = home.bases

    def find(self, digest: str) -> str | None:
        """The folder of a base that was fetched, or None. Its digest is checked again when it is loaded."""
        folder = self._place(digest)
        if folder.is_dir():
            return str(folder)
        pointer = self._place(digest, ".folder")
        if not pointer.is_file():
            return None
        noted = pointer.read_text(encoding="utf-8")
        return noted if (Path(noted) / "config.json").is_file() else None

    def note(self, digest: str, folder: Path) -> None:
        """A base that was found to be right lies elsewhere on this machine."""
        write_atomically(self._place(digest, ".folder"), str(folder).encode())

    def forget(self, digest: str) -> bool:
        """Drop the note of a folder that is no longer right; whether there was one."""
        pointer = self._place(digest, ".folder")
        noted = pointer.is_file()
        pointer.unlink(missing_ok=True)
        return noted

    def is_begun(self, digest: str) -> bool:
        """Whether a part of it has come."""
        return self._place(digest, ".partial").is_dir()

    def partial(self, digest: str) -> Path:
        """Where a base is put together; made on first use. What has come stays there until it is adopted."""
        folder = self._place(digest, ".partial")
        make_folder(folder, 0o700)
        return folder

    def reopen(self, digest: str) -> None:
        """Treat a base that was found to be damaged as one that is still to be fetched; what is whole is kept."""
        whole, partial = self._place(digest), self._place(digest, ".partial")
        if partial.exists():
            shutil.rmtree(partial)
        os.rename(whole, partial)
        fsync_folder(self._folder)

    def adopt(self, digest: str) -> Path:
        """A base that was put together and checked takes its place; returns its folder."""
        whole, partial = self._place(digest), self._place(digest, ".partial")
        fsync_folder(partial)
        os.rename(partial, whole)
        fsync_folder(self._folder)
        return whole

    def drop(self, digest: str) -> None:
        """Delete what has come of a base that proved to be another."""
        shutil.rmtree(self._place(digest, ".partial"))

    def _place(self, digest: str, suffix: str = "") -> Path:
        return self._folder / (require_digest(digest).removeprefix("sha256:") + suffix)
