"""Write a version of the model to a folder, in a separate process (`python -m gym_server.rounds.version_process`).

The job is one line of JSON on standard input. The process does not open the hub's database or keys, and exits when its
parent exits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gym_fed.config.hub.sections import GateConfig
from gym_fed.config.hub.task import SoupReference
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.child_process import leave_at_eof
from gym_fed.core.console import fail
from gym_fed.core.errors import GymError
from gym_fed.core.files import full_disk_named, make_folder, write_atomically
from gym_fed.delta.base import BaseSpec
from gym_server.store.objects import ObjectStore
from gym_server.store.unavailable import StoreUnavailable

WRITTEN_NAME = "version.json"
"""File that describes the folder's content; it is written last."""


class WrittenVersion(StrictModel):
    """Content of ``WRITTEN_NAME``."""

    digest: str
    has_chat_template: bool


class VersionJob(StrictModel):
    """The job of writing one version."""

    source: str
    """Model id or folder to load the base from."""
    base: dict[str, Any]
    """The base, from ``BaseSpec.to_dict``."""
    soups: list[SoupReference]
    """Soups from the base to the version."""
    objects: str
    """URL or folder of the hub's object store."""
    staging: Path
    """Folder for copies of remote objects."""
    max_local_copy_bytes: int
    output: Path
    """Output folder; it must be new."""


def write(job: VersionJob) -> None:
    """Write the model, its tokenizer and ``WRITTEN_NAME``.

    Raises:
        GymError: Errors from ``HubModel`` and ``DeltaFile.open``; ``DISK_FULL``.
        StoreUnavailable: If the object store does not answer.
    """
    from gym_server.rounds.hub_model import HubModel

    make_folder(job.staging, 0o700)
    store = ObjectStore(job.objects, job.staging, job.max_local_copy_bytes, read_only=True)
    model = HubModel(BaseSpec.from_dict(job.base), job.source, store, GateConfig(), job.output)
    model.follow(job.soups)
    with full_disk_named(job.output):
        model.save(job.output)
        found = WrittenVersion(
            digest=model.digest, has_chat_template=bool(getattr(model.tokenizer, "chat_template", None))
        )
        write_atomically(job.output / WRITTEN_NAME, found.model_dump_json().encode())


def main() -> None:
    """Run the job that is read from standard input."""
    job = VersionJob.model_validate_json(sys.stdin.buffer.readline())
    leave_at_eof()
    try:
        write(job)
    except StoreUnavailable as away:
        fail(away.refusal)
    except GymError as error:
        fail(error)


if __name__ == "__main__":
    main()
