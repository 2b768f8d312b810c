"""The model folder of the newest version, written by a separate process and replaced by newer versions."""

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
    """Raised if the process ended without a version.

    Attributes:
        output: The last lines of its standard error.
    """

    def __init__(self, output: list[str]) -> None:
        super().__init__("the version could not be written")
        self.output = output


class VersionFolder:
    """The model folder of the newest version.

    Args:
        live_config: The current config.
        folder: The hub's folder.
        base: The base model.
        round_store: The hub's rounds and versions.
        root: Parent of the model folder.
        staging: Folder for copies of remote objects.
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
        """Return the folder's description if it contains this version; else None."""
        with suppress(OSError, ValidationError):
            found = WrittenVersion.model_validate_json((self.path / WRITTEN_NAME).read_bytes())
            return found if found.digest == version.digest else None
        return None

    def write(self, version: Version) -> WrittenVersion:
        """Write a version and replace the previous one.

        Raises:
            NotWritten: If the process fails. Its files are deleted, since rounds need the disk space.
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
            with suppress(OSError):  # the process succeeded but wrote no folder
                new.rename(self.path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        if (found := self.written(version)) is None:
            raise NotWritten(output)
        return found

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def num_bytes(self) -> int:
        """Return the total size of the files, in bytes."""
        with suppress(OSError):
            return sum(file.stat().st_size for file in self.path.iterdir())
        return 0

    def stop(self) -> None:
        """Stop a running process and start no other."""
        self._process.stop()

    def _run(self, job: VersionJob) -> list[str]:
        """Run the process until it ends; return its output."""
        try:
            return self._process.run(job)[1]
        except JobFailed as failed:
            raise NotWritten(failed.output) from failed
