"""The newest version as a model folder, written by a process of its own; a newer one takes its place."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from gym_fed.core.files import make_folder
from gym_fed.delta.base import BaseSpec
from gym_server.federation import objects_url
from gym_server.rounds.job_process import JobFailed, JobProcess
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.round_store import RoundStore
from gym_server.rounds.version_process import WRITTEN_NAME, VersionJob, WrittenVersion
from gym_server.rounds.versions import Version


class NotWritten(Exception):
    """The process ended without a version.

    Attributes:
        output: The last lines that it printed.
    """

    def __init__(self, output: list[str]) -> None:
        super().__init__("the version could not be written")
        self.output = output


class VersionFolder:
    """One folder for the newest version.

    Args:
        live_config: The config that applies now.
        folder: The hub's folder.
        base: The base model.
        round_store: The hub's rounds and versions.
        root: Where the folder is to be.
        staging: For copies of remote objects.
    """

    def __init__(
        self,
        live_config: LiveConfig,
        folder: Path,
        base: BaseSpec,
        round_store: RoundStore,
        root: Path,
        staging: Path,
    ) -> None:
        self._live_config, self._folder = live_config, folder
        self._base, self._round_store = base, round_store
        self._staging = staging
        self.path = root / "model"
        self._process = JobProcess("gym_server.rounds.version_process")

    def written(self, version: Version) -> WrittenVersion | None:
        """What the folder says, where it holds this version."""
        with suppress(OSError, ValidationError):
            found = WrittenVersion.model_validate_json((self.path / WRITTEN_NAME).read_bytes())
            return found if found.digest == version.digest else None
        return None

    def write(self, version: Version) -> WrittenVersion:
        """Write a version and put it in the place of the one before.

        Raises:
            NotWritten: With what the process printed. What it has written is gone: rounds need the disk.
        """
        new = self.path.with_name("model.new")
        shutil.rmtree(new, ignore_errors=True)
        make_folder(new.parent, 0o700)
        job = VersionJob(
            source=self._live_config.current.base_model,
            base=self._base.to_dict(),
            soups=self._round_store.soups(version.height),
            objects=objects_url(self._folder, self._live_config.current),
            staging=self._staging,
            max_local_copy_bytes=self._live_config.current.storage.max_local_copy_bytes,
            output=new,
        )
        try:
            output = self._run(job)
            self.remove()
            with suppress(OSError):  # it ended well, and without the folder
                new.rename(self.path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        if (found := self.written(version)) is None:
            raise NotWritten(output)
        return found

    def remove(self) -> None:
        """Forget what is written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def num_bytes(self) -> int:
        """Of the files on disk."""
        with suppress(OSError):
            return sum(file.stat().st_size for file in self.path.iterdir())
        return 0

    def stop(self) -> None:
        """End a process that writes now; none is started any more."""
        self._process.stop()

    def _run(self, job: VersionJob) -> list[str]:
        """What the process printed, once it has written the folder."""
        try:
            return self._process.run(job)[1]
        except JobFailed as failed:
            raise NotWritten(failed.output) from failed
