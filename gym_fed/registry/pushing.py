"""Publishes a version: every file first, the signed manifest last, under the next number that nobody has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gym_fed.data.objects import Objects
from gym_fed.errors import GymError
from gym_fed.failpoints import failpoint
from gym_fed.files import file_sha256, write_atomically
from gym_fed.identity.keys import SigningKey
from gym_fed.registry.card.evaluations import read_evaluations
from gym_fed.registry.card.readme import card_of
from gym_fed.registry.contents import Contents
from gym_fed.registry.manifest import CARD, Lineage, ModelFile, ModelManifest, ModelVersion, Signer, sealed
from gym_fed.registry.versions import Versions


def drafted(name: str, contents: Contents, licence: str, description: str, lineage: Lineage) -> ModelManifest:
    """What a version will say, but for its number and the digests of its files."""
    return ModelManifest(
        name=name,
        version=1,
        kind=contents.kind,
        digest=contents.digest,
        licence=licence,
        description=description,
        base=contents.base,
        files=[
            ModelFile(path=path, sha256="0" * 64, num_bytes=0) for path in sorted({CARD, *contents.files})
        ],
        lineage=lineage,
        created_at=int(time.time()),
    )


def write_card(draft: ModelManifest, contents: Contents, evaluations: Sequence[Path], scratch: Path) -> None:
    """Add the card, and the records of evaluations that it shows, to what is pushed.

    Raises:
        GymError: As ``read_evaluations``.
    """
    figures = read_evaluations(evaluations, contents.digest)
    for record in evaluations:
        contents.files[f"evals/{record.name}"] = record
    write_atomically(scratch / CARD, card_of(draft, figures, contents.folder).encode("utf-8"))
    contents.files[CARD] = scratch / CARD


def publish(
    objects: Objects, versions: Versions, draft: ModelManifest, files: Mapping[str, Path], key: SigningKey
) -> ModelVersion:
    """Store the files of a version and its manifest; the newest version with the same content and signer is given back.

    Raises:
        GymError: ``DATA_INVALID`` when a file changes while it is read.
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
            "version": numbers[-1] + 1 if numbers else 1,
            "files": listed,
            "created_at": int(time.time()),
        }
        manifest = ModelManifest.model_validate(draft.model_copy(update=changes).model_dump())
        newest = _newest(versions, draft.name, numbers)
        if newest is not None and newest.signer == signer and newest.manifest.same_content(manifest):
            return newest
        failpoint("registry-before-manifest")
        if versions.create(draft.name, manifest.version, sealed(manifest, key)):
            break  # else another push has taken this number
    failpoint("registry-after-manifest")
    return versions.read(draft.name, manifest.version)


def _newest(versions: Versions, name: str, numbers: Sequence[int]) -> ModelVersion | None:
    """The newest version; None where there is none, or where a damaged one has that number."""
    if not numbers:
        return None
    try:
        return versions.read(name, numbers[-1])
    except GymError:  # a push is how it is put right
        return None


def write_config(file: Path, config: BaseModel | Mapping[str, Any]) -> None:
    """A config as YAML."""
    import yaml

    from gym_fed.config.yaml.file import dump_yaml

    if isinstance(config, BaseModel):
        text = dump_yaml(config)
    else:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_atomically(file, text.encode())
