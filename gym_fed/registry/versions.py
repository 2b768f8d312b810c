"""Versions and tags in a store: numbered files that are written atomically after all other files and never replaced.

models/<name>/<version>.json          a version: its signed manifest
tags/<name>/<tag>/<number>.json       a tag: its signed moves; the newest is valid
digests/<hex>.json                    the version with these tensors, a hint for finding the base of a delta
objects/<first two digits>/<sha256>   the files of all versions, each once
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import file_sha256
from gym_fed.core.text import plain
from gym_fed.data.objects import Objects
from gym_fed.registry.manifest import (
    MAX_MANIFEST_BYTES,
    ModelFile,
    ModelManifest,
    ModelVersion,
    Signer,
    TagMove,
    is_model_name,
    is_tag,
    opened,
    sealed,
)
from gym_fed.trust.identity.keys import SigningKey

LATEST = "latest"
"""The tag that always refers to the newest version; nobody can set it."""

_NUMBERED = re.compile(r"(\d{6})\.json", re.ASCII)
_MAX_SMALL_BYTES = 64 << 10
_MOST_NUMBER = 999_999


class VersionStore:
    """The versions and tags of one store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def names(self) -> list[str]:
        """Return the names of the models in the store, sorted."""
        model_names = set()
        for path in self._objects.tree("models"):
            name, _, file = path.rpartition("/")
            if _NUMBERED.fullmatch(file) and is_model_name(name):
                model_names.add(name)
        return sorted(model_names)

    def numbers(self, name: str) -> list[int]:
        """Return the versions of a model in ascending order; empty if there is no such model."""
        require_name(name)
        return self._numbers(f"models/{name}")

    def read(self, name: str, version: int) -> ModelVersion:
        """Read one version and check its signature.

        Raises:
            GymError: ``NOT_FOUND``; ``STATE_CORRUPT``, ``SIGNATURE_INVALID`` or ``TOO_LARGE`` if it differs from what
                was pushed.
        """
        path = f"models/{name}/{version:06}.json"
        where = f"{self._objects.url}/{path}"
        try:
            data = self._objects.read(path, MAX_MANIFEST_BYTES)
        except FileNotFoundError as error:
            raise GymError(
                ErrorCode.NOT_FOUND, f"{self._objects.url}: no model {name}@{version}", self._known(name)
            ) from error
        manifest, signer, sha256 = opened(data, ModelManifest, where)
        if (manifest.name, manifest.version) != (name, version):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{where}: belongs to {manifest.name}@{manifest.version}",
                "it was moved or copied there: check the store",
            )
        return ModelVersion(manifest, signer, sha256)

    def create(self, name: str, version: int, data: bytes) -> bool:
        """Publish a version; returns False if the number is taken."""
        return self._objects.create(f"models/{name}/{version:06}.json", data)

    def moves(self, name: str, tag: str) -> list[tuple[TagMove, Signer]]:
        """Return all moves of a tag, oldest first; empty if it was never set.

        Raises:
            GymError: See ``read``.
        """
        require_name(name)
        require_tag(tag)
        moves = []
        for number in self._numbers(f"tags/{name}/{tag}"):
            path = f"tags/{name}/{tag}/{number:06}.json"
            where = f"{self._objects.url}/{path}"
            move, signer, _ = opened(self._objects.read(path, _MAX_SMALL_BYTES), TagMove, where)
            if (move.name, move.tag, move.number) != (name, tag, number):
                raise GymError(
                    ErrorCode.STATE_CORRUPT, f"{where} is move {move.number} of {move.name}:{move.tag}"
                )
            moves.append((move, signer))
        return moves

    def move(self, name: str, tag: str, seal: Callable[[int], bytes]) -> int:
        """Add a move to a tag; ``seal`` returns its bytes for a number. Returns the move's number."""
        while True:
            number = _next_number(self._numbers(f"tags/{name}/{tag}"), f"{name}:{tag}")
            if self._objects.create(f"tags/{name}/{tag}/{number:06}.json", seal(number)):
                return number

    def tags(self, name: str) -> list[str]:
        """Return every tag that a model ever had, sorted."""
        require_name(name)
        tag_names = set()
        for path in self._objects.tree(f"tags/{name}"):
            tag, _, file = path.rpartition("/")
            if _NUMBERED.fullmatch(file) and is_tag(tag):
                tag_names.add(tag)
        return sorted(tag_names)

    def note_digest(self, digest: str, name: str, version: int) -> None:
        """Record which version has these tensors, as a hint for deltas; an existing hint is kept."""
        hint = json.dumps({"name": name, "version": version}, sort_keys=True).encode()
        self._objects.create(f"digests/{digest.removeprefix('sha256:')}.json", hint)

    def with_digest(self, digest: str) -> ModelVersion | None:
        """Return a version with these tensors, if the store has a valid hint."""
        with suppress(FileNotFoundError, ValueError, RecursionError, KeyError, TypeError, GymError):
            hint = json.loads(
                self._objects.read(f"digests/{digest.removeprefix('sha256:')}.json", _MAX_SMALL_BYTES)
            )
            name, number = str(hint["name"]), int(hint["version"])
            if is_model_name(name) and number in self.numbers(name):
                version = self.read(name, number)
                return version if version.manifest.digest == digest else None
        return None

    def resolve(self, reference: str) -> tuple[str, int, tuple[TagMove, Signer] | None]:
        """Resolve ``name``, ``name@version`` or ``name:tag`` to name, version, and the tag's newest move.

        Raises:
            GymError: ``USAGE``, ``NOT_FOUND``.
        """
        name, mark, selector = split_reference(reference)
        numbers = self.numbers(name)
        if not numbers:
            raise GymError(ErrorCode.NOT_FOUND, f"{self._objects.url}: no model {name}", self._known(name))
        if mark == "@":
            if int(selector) not in numbers:
                raise GymError(
                    ErrorCode.NOT_FOUND, f"{self._objects.url}: no model {reference}", self._known(name)
                )
            return name, int(selector), None
        if mark == "" or selector == LATEST:
            return name, numbers[-1], None
        moves = self.moves(name, selector)
        if not moves or moves[-1][0].version is None:
            tags = ", ".join([LATEST, *self.tags(name)])
            raise GymError(
                ErrorCode.NOT_FOUND, f"{self._objects.url}: {name} has no tag {selector}", f"its tags: {tags}"
            )
        return name, moves[-1][0].version, moves[-1]

    def _numbers(self, folder: str) -> list[int]:
        names = self._objects.names(folder)
        return sorted(int(match[1]) for file in names if (match := _NUMBERED.fullmatch(file)))

    def _known(self, name: str) -> str:
        if numbers := self._numbers(f"models/{name}"):
            return f"existing versions: {', '.join(map(str, numbers[-20:]))}"
        return f"models in the store: {', '.join(self.names()[:8]) or 'none'}"


def split_reference(reference: str) -> tuple[str, str, str]:
    """Split ``name@3`` into ``("name", "@", "3")``, ``name:tag`` likewise, and ``name`` into ``("name", "", "")``.

    Raises:
        GymError: ``USAGE`` naming the problem.
    """
    name, mark, selector = reference.partition("@")
    if not mark:
        name, mark, selector = reference.partition(":")
    require_name(name)
    if mark == "@" and not re.fullmatch(r"[1-9]\d{0,5}", selector, re.ASCII):
        raise GymError(
            ErrorCode.USAGE,
            f"{plain(reference, 120)}: {plain(selector, 40)!r} is not a version",
            "use a number, such as @1",
        )
    if mark == ":":
        require_tag(selector)
    return name, mark, selector


def _next_number(taken: Sequence[int], name: str) -> int:
    """Return the next free number.

    Raises:
        GymError: ``STATE_CORRUPT`` if the highest possible number is taken.
    """
    number = max(taken, default=0) + 1
    if number > _MOST_NUMBER:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"{name} has the number {_MOST_NUMBER}, the highest possible",
            "the number is implausible: check the store for a file that does not belong there",
        )
    return number


def require_name(name: str) -> None:
    """Raise ``USAGE`` for an invalid model name."""
    if not is_model_name(name):
        raise GymError(
            ErrorCode.USAGE,
            f"{plain(name, 80)!r} is not a valid model name",
            "lowercase letters, digits, dots and dashes, with at most one /, such as me/stories",
        )


def require_tag(tag: str) -> None:
    """Raise ``USAGE`` for an invalid tag."""
    if not is_tag(tag):
        raise GymError(
            ErrorCode.USAGE,
            f"{plain(tag, 80)!r} is not a valid tag",
            "use a lowercase letter first, then lowercase letters, digits, dots and dashes, such as stable",
        )


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
            "version": _next_number(numbers, draft.name),
            "files": listed,
            "created_at": int(time.time()),
        }
        manifest = ModelManifest.model_validate(draft.model_copy(update=changes).model_dump())
        newest = _newest(versions, draft.name, numbers)
        if newest is not None and newest.signer == signer and newest.manifest.same_content(manifest):
            return newest
        failpoint("registry-before-manifest")
        if versions.create(draft.name, manifest.version, sealed(manifest, key)):
            break  # otherwise a concurrent push has used this number
    failpoint("registry-after-manifest")
    return versions.read(draft.name, manifest.version)


def _newest(versions: VersionStore, name: str, numbers: Sequence[int]) -> ModelVersion | None:
    """Return the newest version; None if there is none or it is damaged."""
    if not numbers:
        return None
    try:
        return versions.read(name, numbers[-1])
    except GymError:  # the push repairs it
        return None
