"""The evidence of an admitted update, kept by the contributor to answer an audit: ``audits/<update id>/`` in the home.

The folder contains ``task.json``, ``manifest.json``, ``rows.jsonl``, ``update.gymdelta``, and the record of the
training: ``leaves.jsonl`` and a file of weights and moments per step. It is created in the task's folder and moved here
when the hub admits the update. It is deleted when the time to answer has passed, when the update was not drawn, or when
the contributor leaves the hub.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_client.agent.tasks import TaskFolder
from gym_client.identity.home import Home
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder, make_folder, write_atomically
from gym_fed.core.text import plain
from gym_fed.trust.identity.manifest import UpdateManifest

if TYPE_CHECKING:
    from gym_client.agent.data import Data
    from gym_fed.training.audits.recorder import StepRecorder

_TASK, _MANIFEST, _ROWS, _DELTA = "task.json", "manifest.json", "rows.jsonl", "update.gymdelta"
_DAY = 86400


@dataclass(frozen=True)
class Evidence:
    """The evidence folder of one update."""

    folder: Path

    @property
    def update(self) -> str:
        """The id of the update."""
        return self.folder.name

    @property
    def task(self) -> TaskSpec:
        """The task of the update.

        Raises:
            GymError: ``STATE_CORRUPT`` if it cannot be read.
        """
        path = self.folder / _TASK
        try:
            return TaskSpec.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path} is not a task: {plain(error, 200)}",
                f"delete {self.folder}; an audit of this update then counts as unanswered",
            ) from error

    @property
    def manifest(self) -> UpdateManifest:
        return UpdateManifest.parse((self.folder / _MANIFEST).read_text(encoding="utf-8"))

    @property
    def delta_path(self) -> Path:
        return self.folder / _DELTA

    def rows(self) -> list[dict[str, Any]]:
        """Return the training rows in their original order."""
        return [json.loads(line) for line in (self.folder / _ROWS).read_text(encoding="utf-8").splitlines()]

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def drop(self) -> None:
        """Delete the folder. After a kill, the next call of ``kept_evidence`` deletes the rest."""
        hidden = self.folder.with_name("." + self.folder.name)
        os.replace(self.folder, hidden)
        shutil.rmtree(hidden)


def begin_record(
    home: Home, spec: TaskSpec, folder: TaskFolder, data: Data, max_bytes: int, now: float
) -> StepRecorder:
    """Delete expired evidence, then return a recorder for a task's training.

    Args:
        home: The contributor's home.
        spec: The task, which requires audits.
        folder: The task's folder.
        data: The contributor's rows.
        max_bytes: Maximum total size of the evidence in this home, in bytes.
        now: The hub's time in Unix seconds.
    """
    from gym_fed.training.audits.recorder import StepRecorder

    assert spec.audit is not None
    drop_expired(home, spec.server, now)
    record = folder.audit
    make_folder(record)
    if not (record / _TASK).exists():
        write_atomically(record / _ROWS, "".join(json.dumps(row) + "\n" for row in data.rows).encode())
        write_atomically(record / _TASK, json.dumps(spec.model_dump(mode="json")).encode())
    kept = sum(evidence.size_bytes() for evidence in kept_evidence(home))
    return StepRecorder(record, max(0, max_bytes - kept))


def keep_evidence(home: Home, folder: TaskFolder, update: str) -> None:
    """Move the training record of an admitted update from its task's folder to ``audits/``."""
    finished = folder.finished()
    if finished is None or finished.manifest.digest != update or not folder.audit.exists():
        return
    write_atomically(
        folder.audit / _MANIFEST, json.dumps(finished.manifest.model_dump(mode="json"), indent=1).encode()
    )
    shutil.copyfile(folder.delta_path, folder.audit / _DELTA)
    target = home.audits / update
    if not target.exists():
        os.replace(folder.audit, target)
        fsync_folder(target.parent)


def kept_evidence(home: Home) -> Iterator[Evidence]:
    """Yield the evidence in a home, sorted by update id."""
    for path in sorted(home.audits.iterdir()):
        if path.name.startswith("."):
            shutil.rmtree(path)
        elif path.is_dir():
            yield Evidence(path)


def drop_expired(home: Home, server: str, now: float) -> None:
    """Delete evidence whose time to answer has passed.

    Evidence for other hubs is deleted a week later by this machine's clock, since a hub may no longer exist.

    Args:
        home: The contributor's home.
        server: Id of the hub.
        now: The hub's time in Unix seconds. It is not trusted if it is later than this machine's time.
    """
    for evidence in list(kept_evidence(home)):
        task = evidence.task
        # The hub draws updates only after the round has ended.
        ends = max(evidence.manifest.issued_at_seconds, task.deadline_seconds) + _DAY
        passed = min(now, time.time()) if task.server == server else time.time() - 7 * _DAY
        if task.audit is None or passed > ends + task.audit.answer_seconds:
            evidence.drop()


def drop_all(home: Home, server: str) -> None:
    """Delete all evidence for a hub, which contains copies of the rows."""
    for evidence in list(kept_evidence(home)):
        if evidence.task.server == server:
            evidence.drop()
