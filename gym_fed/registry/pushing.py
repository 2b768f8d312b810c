"""Publication of a version: files first, the signed manifest last, under the next free number."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import file_sha256
from gym_fed.data.objects import Objects
from gym_fed.registry.manifest import ModelFile, ModelManifest, ModelVersion, Signer, sealed
from gym_fed.registry.versions import VersionStore, next_number
from gym_fed.trust.identity.keys import SigningKey


def publish(
    objects: Objects, versions: VersionStore, draft: ModelManifest, files: Mapping[str, Path], key: SigningKey
) -> ModelVersion:
    """Store the files of a version and its manifest; returns the newest version if it has the same content and signer.

    Raises:
        GymError: ``DATA_INVALID`` if a file changes while it is read.
    """
    listed = []
    for path, local in sorted(files.items()):
        sha256 = file_sha256(local)
        objects.put(local, sha256)
        failpoint("registry-object-put")
        listed.append(ModelFile(path=path, sha256=sha256, num_bytes=local.stat().st_size))
    signer = Signer(key.public_key)
    while True:
        numbers = versions.numbers(draft.name)
        changes: dict[str, Any] = {
            "version": next_number(numbers, draft.name),
            "files": listed,
            "created_at": int(time.time()),
        }
        manifest = ModelManifest.model_validate(draft.model_copy(update=changes).model_dump())
        newest = _newest(versions, draft.name, numbers)
        if newest is not None and newest.signer == signer and newest.manifest.same_content(manifest):
            return newest
        failpoint("registry-before-manifest")
        if versions.create(draft.name, manifest.version, sealed(manifest, key)):
            break  # otherwise another push has taken this number
    failpoint("registry-after-manifest")
    return versions.read(draft.name, manifest.version)


def _newest(versions: VersionStore, name: str, numbers: Sequence[int]) -> ModelVersion | None:
    """Return the newest version; None if there is none, or a damaged one has that number."""
    if not numbers:
        return None
    try:
        return versions.read(name, numbers[-1])
    except GymError:  # a push repairs it
        return None
