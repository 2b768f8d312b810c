"""Task folders, which preserve a task, its checkpoints and its finished update if the agent is killed."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder, make_folder, write_atomically
from gym_fed.core.json_files import canonical_json
from gym_fed.core.text import counted
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce

_SECONDS_TO_SUBMIT = 300
_KEPT_SECONDS = 7 * 24 * 3600
_MAX_OTHERS = 2
"""Maximum number of other tasks of a hub whose work is kept, for the case that the hub assigns them again."""


@dataclass(frozen=True)
class FinishedUpdate:
    """A signed update that can be submitted any number of times."""

    manifest: UpdateManifest
    signature: bytes
    public_key: bytes
    delta_path: Path
    metrics: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """An encoded but unsigned delta."""

    sha256: str
    size_bytes: int
    num_examples: int
    metrics: dict[str, float]
    publish_name: bool = False
    """See ``UpdateManifest.publish_name``."""
    training_root: str | None = None
    """See ``UpdateManifest.training_root``."""


class TaskFolder:
    """The folder ``tasks/<message id>/`` of one task.

    It contains ``task.json``, ``run/``, ``audit/``, ``update.gymdelta``, a residual, moments and ``finished.json``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "run"
        self.audit = path / "audit"
        self.delta_path = path / "update.gymdelta"
        self.residual_path = path / "residual.safetensors"
        self.moments_path = path / "moments.safetensors"

    def begin(self, spec: TaskSpec, setup: dict[str, Any]) -> None:
        """Start or resume the task.

        Work for the same task and setup is reused, even under another message id if the hub has reassigned the task.
        Work for earlier rounds of the hub is deleted, and all but the newest of the rest: each may have checkpoints
        of the whole model, and a hub may take back any number of tasks.

        Args:
            spec: The task.
            setup: Other inputs that determine the result (data, device, model), as JSON-compatible values.
        """
        identity = _identity(spec, setup)
        if self._identity() == identity:
            return
        if self.path.exists():
            shutil.rmtree(self.path)
        for other in sorted(self.path.parent.glob("*/task.json")):
            if other.read_bytes() == identity:
                os.replace(other.parent, self.path)
                fsync_folder(self.path.parent)
                return
            if _is_earlier(other, spec):
                shutil.rmtree(other.parent)
        others = [
            file for file in self.path.parent.glob("*/task.json") if _spec(file)["server"] == spec.server
        ]
        for old in sorted(others, key=lambda file: file.stat().st_mtime, reverse=True)[_MAX_OTHERS:]:
            shutil.rmtree(old.parent)
        make_folder(self.path)
        write_atomically(self.path / "task.json", identity)

    def prepare_run(self) -> Path:
        """Return the training run's folder; first delete a run that was killed before its training started."""
        if self.run.exists() and not (self.run / "run.json").exists():
            shutil.rmtree(self.run)
        return self.run

    def finish(self, spec: TaskSpec, trained: Trained, key: SigningKey, now: float) -> FinishedUpdate:
        """Sign the delta at ``delta_path`` with the hub's time ``now``, and store the manifest and signature."""
        issued, expires = lifetime(now)
        manifest = UpdateManifest(
            contributor=key.contributor,
            server=spec.server,
            task=self.path.name,
            server_round=spec.server_round,
            base_digest=spec.version_digest,
            delta_sha256=trained.sha256,
            delta_bytes=trained.size_bytes,
            nonce=new_nonce(),
            issued_at_seconds=issued,
            expires_at_seconds=expires,
            num_examples=trained.num_examples,
            metrics=trained.metrics,
            publish_name=trained.publish_name,
            training_root=trained.training_root,
        )
        finished = FinishedUpdate(
            manifest, manifest.sign(key), key.public_key, self.delta_path, trained.metrics
        )
        document = {
            "manifest": manifest.model_dump(mode="json"),
            "signature": finished.signature.hex(),
            "public_key": finished.public_key.hex(),
            "metrics": trained.metrics,
        }
        write_atomically(self.path / "finished.json", json.dumps(document, indent=2).encode())
        return finished

    def finished(self) -> FinishedUpdate | None:
        """Return the finished update with its original nonce; None if it is not finished.

        Raises:
            GymError: ``STATE_CORRUPT`` with the name of the file.
        """
        path = self.path / "finished.json"
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            manifest = UpdateManifest.parse(json.dumps(document["manifest"]))
            signature, public_key = (
                bytes.fromhex(document["signature"]),
                bytes.fromhex(document["public_key"]),
            )
            metrics = {str(k): float(v) for k, v in document["metrics"].items()}
            size = self.delta_path.stat().st_size
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OSError, GymError) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{path}: {error}", "delete the folder to train again"
            ) from error
        if size != manifest.delta_bytes:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self.delta_path} has {counted(size, 'byte')}, but its manifest says {manifest.delta_bytes}",
                "delete the folder to train again",
            )
        return FinishedUpdate(manifest, signature, public_key, self.delta_path, metrics)

    def renewed(self, spec: TaskSpec, key: SigningKey, now: float) -> FinishedUpdate | None:
        """Return the finished update, signed again if needed.

        A new signature is needed if the update answers an earlier message, expires soon after ``now`` (the hub's time),
        or was signed with a former key.
        """
        finished = self.finished()
        if finished is None:
            return None
        manifest = finished.manifest
        lasts = manifest.expires_at_seconds > now + _SECONDS_TO_SUBMIT
        if manifest.task == self.path.name and lasts and finished.public_key == key.public_key:
            return finished
        trained = Trained(
            manifest.delta_sha256,
            manifest.delta_bytes,
            manifest.num_examples,
            dict(manifest.metrics),
            manifest.publish_name,
            manifest.training_root,
        )
        return self.finish(spec, trained, key, now)

    def drop(self) -> None:
        """Delete the task's folder."""
        if self.path.exists():
            shutil.rmtree(self.path)

    def _identity(self) -> bytes | None:
        path = self.path / "task.json"
        return path.read_bytes() if path.exists() else None


def drop_old(tasks: Path) -> None:
    """Delete tasks that have not been modified for a week."""
    for folder in tasks.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < time.time() - _KEPT_SECONDS:
            shutil.rmtree(folder)


def _spec(task_file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(task_file.read_bytes())["spec"]
    return found


def _is_earlier(task_file: Path, spec: TaskSpec) -> bool:
    other = _spec(task_file)
    return bool(other["server"] == spec.server and other["server_round"] < spec.server_round)


def _identity(spec: TaskSpec, setup: dict[str, Any]) -> bytes:
    return canonical_json({"spec": spec.model_dump(mode="json"), "setup": setup})
