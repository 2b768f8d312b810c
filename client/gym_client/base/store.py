"""Storage of downloaded base models in the home: one folder per digest, which exists only when complete.

bases/<digest>/            all files, with verified digest
bases/<digest>.partial/    completed files, and <sha256>.part of the current download
bases/<digest>.folder      path of a base in the Hugging Face cache
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gym_client.base.offer import require_digest
from gym_client.identity.home import Home
from gym_fed.core.files import fsync_folder, make_folder, write_atomically


class BaseStore:
    """The base models in a home. The caller must hold the home's lock."""

    def __init__(self, home: Home) -> None:
        self._folder = home.bases

    def find(self, digest: str) -> str | None:
        """Return the folder of a fetched base, or None. The digest is verified again when the base is loaded."""
        folder = self._place(digest)
        if folder.is_dir():
            return str(folder)
        pointer = self._place(digest, ".folder")
        if not pointer.is_file():
            return None
        noted = pointer.read_text(encoding="utf-8")
        return noted if (Path(noted) / "config.json").is_file() else None

    def note(self, digest: str, folder: Path) -> None:
        """Record the folder of a verified base that is outside the home."""
        write_atomically(self._place(digest, ".folder"), str(folder).encode())

    def forget(self, digest: str) -> bool:
        """Delete the record of a folder that no longer contains the base. Return True if there was one."""
        pointer = self._place(digest, ".folder")
        noted = pointer.is_file()
        pointer.unlink(missing_ok=True)
        return noted

    def is_begun(self, digest: str) -> bool:
        """Return True if a download has been started."""
        return self._place(digest, ".partial").is_dir()

    def partial(self, digest: str) -> Path:
        """Return the download folder of a base, created on first use and kept until ``adopt``."""
        folder = self._place(digest, ".partial")
        make_folder(folder, 0o700)
        return folder

    def reopen(self, digest: str) -> None:
        """Turn a damaged base back into an incomplete download; intact files are kept."""
        whole, partial = self._place(digest), self._place(digest, ".partial")
        if partial.exists():
            shutil.rmtree(partial)
        os.rename(whole, partial)
        fsync_folder(self._folder)

    def adopt(self, digest: str) -> Path:
        """Move a complete, verified download to its final folder and return it."""
        whole, partial = self._place(digest), self._place(digest, ".partial")
        fsync_folder(partial)
        os.rename(partial, whole)
        fsync_folder(self._folder)
        return whole

    def drop(self, digest: str) -> None:
        """Delete the download of a base whose digest was wrong."""
        shutil.rmtree(self._place(digest, ".partial"))

    def _place(self, digest: str, suffix: str = "") -> Path:
        return self._folder / (require_digest(digest).removeprefix("sha256:") + suffix)
