"""The dataset registry: named, versioned datasets with SPDX licences on an object store, verified on push and pull.

The store is a folder or any fsspec URL. Objects are named by the sha256 of their bytes, as in the hub's store; a
version of a dataset is a small manifest that names its objects. The manifest is written last and never replaced, so
that an interrupted push publishes nothing, and two concurrent pushes get different versions::

    objects/<first two digits>/<sha256>     datasets/<name>/<version>.json
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError, field_validator

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.aliases import on_class_too
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home, file_sha256, is_safe_path, write_atomically
from gym_fed.core.text import counted, plain
from gym_fed.data.objects import Objects

CARD_NAME = ".gym-dataset.json"
_MAX_FILES = 100_000
_MAX_FILE_BYTES = 1 << 42
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(/[a-z0-9][a-z0-9._-]{0,63})?")
_MANIFEST = re.compile(r"(\d{6})\.json")


class DatasetFile(StrictModel):
    """A file of a dataset."""

    path: str
    """Path relative to the dataset's folder, with ``/`` as separator."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    num_bytes: int = Field(ge=0, le=_MAX_FILE_BYTES)

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        if not is_safe_path(value):
            raise ValueError("is not a safe path on every system")
        return value


class DatasetManifest(StrictModel):
    """A version of a dataset, as published by a push."""

    name: str
    version: int = Field(ge=1)
    licence: str
    """SPDX identifier of the licence, or ``LicenseRef-NAME``."""
    description: str
    files: list[DatasetFile] = Field(min_length=1, max_length=_MAX_FILES)
    created_at: float
    """Time of creation in Unix seconds."""

    @field_validator("files")
    @classmethod
    def _validate_files(cls, files: list[DatasetFile]) -> list[DatasetFile]:
        paths = {CARD_NAME.lower()}
        for file in files:
            if file.path.lower() in paths:
                raise ValueError(f"{plain(repr(file.path), 80)} is listed twice, or is the card's name")
            paths.add(file.path.lower())  # file systems of macOS and Windows ignore case
        for path in paths:
            if any(str(folder) in paths for folder in PurePosixPath(path).parents):
                raise ValueError(f"{plain(repr(path), 80)} is below a file")
        return files

    def same_content(self, other: DatasetManifest) -> bool:
        """Return True if two versions differ at most in number and time."""
        skipped = {"version", "created_at"}
        return self.model_dump(exclude=skipped) == other.model_dump(exclude=skipped)


Manifests = list[DatasetManifest]
Versions = list[int]  # defined here, since the method ``list`` below hides the built-in name


def default_store() -> str:
    """Return the default store: ``$GYM_DATASETS``, else ``datasets`` in ``$GYM_HOME`` or ``~/.gym-fed``."""
    return os.environ.get("GYM_DATASETS") or str(default_home() / "datasets")


class DatasetRegistry:
    """The datasets in one store.

    Args:
        url: A folder, or an fsspec URL such as ``s3://bucket/datasets``; by default ``default_store()``.
    """

    def __init__(self, url: str | Path | None = None) -> None:
        self._objects = Objects(default_store() if url is None else url)

    @on_class_too
    def push(
        self, name: str, path: str | Path, *, licence: str | None = None, description: str = ""
    ) -> DatasetManifest:
        """Publish a file, or all visible files of a folder, as the next version of ``name``.

        Existing objects are not uploaded again; pushing the newest version again returns that version.

        Raises:
            GymError: ``USAGE`` without a valid name or licence; ``FILE_NOT_FOUND``; ``DATA_INVALID`` for a file
                with an unsafe name, or one that changes while it is read.
        """
        _check_name(name)
        licence = checked_licence(licence)
        local_files = list(_local_files(Path(path)))
        for local, relative in local_files:
            if not is_safe_path(relative):
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{local}: its name cannot be stored on every system",
                    "rename it: no colons, backslashes or names such as aux, and no dot or space at the end",
                )
        if len({relative.lower() for _, relative in local_files}) < len(local_files):
            problem = f"{path}: two files have the same name but for its case"
            raise GymError(ErrorCode.DATA_INVALID, problem, "rename one: macOS and Windows ignore case")
        if len(local_files) > _MAX_FILES:
            problem = f"{path} has {counted(len(local_files), 'file')}, more than {_MAX_FILES:,}"
            raise GymError(ErrorCode.DATA_INVALID, problem, "pack the rows into fewer files")
        files = []
        for local, relative in local_files:
            sha256 = file_sha256(local)
            self._objects.put(local, sha256)
            files.append(DatasetFile(path=relative, sha256=sha256, num_bytes=local.stat().st_size))
        while True:
            versions = self.versions(name)
            draft = DatasetManifest(
                name=name,
                version=versions[-1] + 1 if versions else 1,
                licence=licence,
                description=description,
                files=files,
                created_at=time.time(),
            )
            if versions and (newest := self.show(name)).same_content(draft):
                return newest
            data = json.dumps(draft.model_dump(), indent=1, sort_keys=True).encode()
            if self._objects.create(_manifest_path(name, draft.version), data):
                return draft  # otherwise a concurrent push has taken this number

    @on_class_too
    def pull(self, reference: str, dest: str | Path) -> DatasetManifest:
        """Download ``name`` (newest version) or ``name@version`` into the folder ``dest``; an interrupted pull resumes.

        The manifest, which contains the licence, is written next to the files as ``.gym-dataset.json``.

        Raises:
            GymError: ``NOT_FOUND``; ``FILE_EXISTS`` before anything is fetched, if a file with different content
                exists; ``HASH_MISMATCH`` if the store's object does not match the manifest.
        """
        manifest = self.show(reference)
        folder = Path(dest)
        missing = []
        for file in manifest.files:
            target = folder / file.path
            if not target.exists():
                missing.append(file)
            elif not target.is_file() or file_sha256(target) != file.sha256:
                raise GymError(
                    ErrorCode.FILE_EXISTS,
                    f"{target} already exists with different content than in {manifest.name}@{manifest.version}",
                    "choose another folder",
                )
        for file in missing:
            self._objects.fetch(file.sha256, file.num_bytes, folder / file.path)
        card = json.dumps(manifest.model_dump(), indent=1, sort_keys=True)
        write_atomically(folder / CARD_NAME, card.encode())
        return manifest

    def show(self, reference: str) -> DatasetManifest:
        """Return the manifest of ``name`` or ``name@version``.

        Raises:
            GymError: ``NOT_FOUND``; ``STATE_CORRUPT`` for a manifest that cannot be read.
        """
        name, _, number = reference.partition("@")
        _check_name(name)
        versions = self.versions(name)
        if number and not number.isdecimal():
            raise GymError(
                ErrorCode.USAGE, f"{reference}: {number!r} is not a version", "use a number, such as @1"
            )
        version = int(number) if number else max(versions, default=0)
        if version not in versions:
            known = f"versions {', '.join(map(str, versions))}"
            if not versions:
                known = f"datasets: {', '.join(sorted(self._all_names())[:8]) or 'none'}"
            raise GymError(
                ErrorCode.NOT_FOUND, f"{self._objects.url}: no dataset {reference}", f"available {known}"
            )
        path = _manifest_path(name, version)
        try:
            manifest = DatasetManifest.model_validate_json(self._objects.read(path))
        except ValidationError as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self._objects.url}/{path}: {first_problem(error)}",
                "restore the manifest, or push the dataset again",
            ) from error
        if (manifest.name, manifest.version) != (name, version):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self._objects.url}/{path} belongs to {manifest.name}@{manifest.version}",
            )
        return manifest

    def list(self) -> Manifests:
        """List the newest version of every dataset, by name."""
        return [self.show(name) for name in sorted(self._all_names())]

    def versions(self, name: str) -> Versions:
        """List the versions of a dataset, ascending; empty if there is none."""
        names = self._objects.names(f"datasets/{name}")
        return sorted(int(match[1]) for file in names if (match := _MANIFEST.fullmatch(file)))

    def _all_names(self) -> set[str]:
        paths = self._objects.tree("datasets")
        names = {p.rpartition("/")[0] for p in paths if _MANIFEST.fullmatch(p.rpartition("/")[2])}
        return {name for name in names if _NAME.fullmatch(name)}


def _manifest_path(name: str, version: int) -> str:
    return f"datasets/{name}/{version:06}.json"


def is_dataset_name(reference: str) -> bool:
    """Return True if ``name`` or ``name@version`` is a valid dataset name."""
    name, at, version = reference.partition("@")
    return _NAME.fullmatch(name) is not None and (not at or version.isdecimal())


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise GymError(
            ErrorCode.USAGE,
            f"{name[:80]!r} is not a valid dataset name",
            "lowercase letters, digits, dots and dashes, with at most one /, such as me/stories",
        )


def _local_files(path: Path) -> Iterator[tuple[Path, str]]:
    if path.is_file():
        yield path, path.name
        return
    files: list[Any] = []
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                files.append((file, relative.as_posix()))
    if not files:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no files at {path}", "use a file, or a folder with files")
    yield from files


KNOWN = (
    *("Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "C-UDA-1.0", "CC-BY-2.0", "CC-BY-3.0", "CC-BY-4.0"),
    *(
        "CC-BY-NC-2.0",
        "CC-BY-NC-3.0",
        "CC-BY-NC-4.0",
        "CC-BY-NC-ND-4.0",
        "CC-BY-NC-SA-3.0",
        "CC-BY-NC-SA-4.0",
    ),
    *("CC-BY-ND-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-PDDC", "CC0-1.0", "CDLA-Permissive-1.0"),
    *("CDLA-Permissive-2.0", "CDLA-Sharing-1.0", "ECL-2.0", "EUPL-1.2", "GFDL-1.3-or-later"),
    *("GPL-2.0-only", "GPL-2.0-or-later", "GPL-3.0-only", "GPL-3.0-or-later", "ISC", "LGPL-3.0-or-later"),
    *("MIT", "MIT-0", "MPL-2.0", "O-UDA-1.0", "ODC-By-1.0", "ODbL-1.0", "OGL-UK-3.0", "PDDL-1.0"),
    *("Unlicense", "etalab-2.0"),
)
"""SPDX identifiers of licences that are used for datasets and models."""


_OWN = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")


def checked_licence(text: str | None) -> str:
    """Normalise ``text`` to SPDX identifiers, which may be joined by AND or OR.

    Raises:
        GymError: ``USAGE`` for a missing or unknown licence.
    """
    if text is None or not text.strip():
        raise GymError(
            ErrorCode.USAGE,
            "licence: missing",
            "specify one, such as CC-BY-4.0; use LicenseRef-NAME for one without an SPDX identifier",
        )
    parts = re.split(r"\s+(AND|OR)\s+", text.strip())
    by_lower = {name.lower(): name for name in KNOWN}
    for at in range(0, len(parts), 2):
        if _OWN.fullmatch(parts[at]):
            continue
        known = by_lower.get(parts[at].lower())
        if known is None:
            close = difflib.get_close_matches(parts[at].lower(), by_lower, n=3, cutoff=0.5)
            meant = f"perhaps {', '.join(by_lower[name] for name in close)}; " if close else ""
            raise GymError(
                ErrorCode.USAGE,
                f"licence: {parts[at]!r} is not a known SPDX identifier",
                f"{meant}use LicenseRef-NAME for one without an identifier",
            )
        parts[at] = known
    return " ".join(parts)
