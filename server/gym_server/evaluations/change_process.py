"""Run ``measure_change`` in a separate process: `python -m gym_server.evaluations.change_process`.

The job is one line of JSON on standard input, and the result is written to standard output. The process does not open
the hub's database or keys, and exits when its parent exits.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from gym_fed.config.hub.sections import GateConfig
from gym_fed.config.hub.task import SoupReference
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.child_process import leave_at_eof
from gym_fed.core.console import fail
from gym_fed.core.errors import GymError
from gym_fed.core.files import make_folder
from gym_fed.core.text import plain
from gym_fed.delta.base import BaseSpec
from gym_server.federation import objects_url
from gym_server.rounds.job_process import JobFailed, JobProcess
from gym_server.rounds.recipes import LiveConfig
from gym_server.state import HubState
from gym_server.store.objects import ObjectStore
from gym_server.store.unavailable import StoreUnavailable

if TYPE_CHECKING:
    from gym_server.evaluations.change import VersionChange

log = logging.getLogger("gym_server")


class ChangeJob(StrictModel):
    """The description of the version to measure, sent to the child process."""

    source: str
    """Model id or folder to load the base from."""
    base: dict[str, Any]
    """The base, from ``BaseSpec.to_dict``."""
    soups: list[SoupReference]
    """Soups from the base to the version."""
    height: int
    objects: str
    """URL or folder of the hub's object store."""
    staging: Path
    """Folder for copies of remote objects."""
    max_local_copy_bytes: int
    gate: GateConfig
    folder: Path
    """The hub's folder; relative paths in the gate's config are resolved against it."""


class ChangeRun:
    """The measurement of the current version in a separate process.

    Args:
        state: The hub's state.
        live_config: The current config.
    """

    def __init__(self, state: HubState, live_config: LiveConfig) -> None:
        self._state, self._live_config = state, live_config
        self._process = JobProcess("gym_server.evaluations.change_process")
        self._is_stopped = False

    def result(self) -> VersionChange | None:
        """Wait for the result; None before the first version, after ``stop``, or after a logged failure."""
        from gym_server.evaluations.change import VersionChange

        try:
            job = self._job()
            return VersionChange.model_validate_json(self._process.run(job)[0]) if job.height else None
        except (JobFailed, OSError, ValidationError, SQLAlchemyError, StoreUnavailable) as error:
            if not self._is_stopped:
                reason = error.output[-1] if isinstance(error, JobFailed) and error.output else str(error)
                log.warning("the newest version was not compared with version 0: %s", plain(reason, 300))
            return None

    def stop(self) -> None:
        """Stop the process if it is running."""
        self._is_stopped = True
        self._process.stop()

    def _job(self) -> ChangeJob:
        height = self._state.round_store.head().height
        return ChangeJob(
            source=self._live_config.current.base_model,
            base=self._state.base.to_dict(),
            soups=self._state.round_store.soups(height) if height else [],
            height=height,
            objects=objects_url(self._state.folder, self._live_config.current),
            staging=self._state.store.staging,
            max_local_copy_bytes=self._live_config.current.storage.max_local_copy_bytes,
            gate=self._live_config.current.gate,
            folder=self._state.folder,
        )


def main() -> None:
    """Run the job that is read from standard input."""
    job = ChangeJob.model_validate_json(sys.stdin.buffer.readline())
    leave_at_eof()
    try:
        from gym_server.evaluations.change import measure_change
        from gym_server.rounds.hub_model import HubModel

        make_folder(job.staging, 0o700)
        store = ObjectStore(job.objects, job.staging, job.max_local_copy_bytes, read_only=True)
        model = HubModel(BaseSpec.from_dict(job.base), job.source, store, job.gate, job.folder)
        found = measure_change(model, job.soups, job.height)
    except StoreUnavailable as away:
        fail(away.refusal)
    except GymError as error:
        fail(error)
    sys.stdout.write(found.model_dump_json())


if __name__ == "__main__":
    main()
