"""Describe a download before it starts: commit, files, bytes and licence of a Hub repository.

The Hub's description is untrusted: its size, names and checksums are validated. A model is offered only if it can be
loaded, so its config and the index of its weights are read first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_fed.base.downloads import hub
from gym_fed.base.downloads.selection import chosen_files, unlisted_shards, weights_index
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import is_safe_path
from gym_fed.core.text import counted, plain, readable_bytes

MAX_FILES = 20_000
"""Maximum number of files of a repository; the largest public model repositories have a few thousand."""
MAX_SMALL_BYTES = 64 << 20
"""Maximum size of a config or index that is read before the offer."""


class _Lfs(BaseModel):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class _Sibling(BaseModel):
    rfilename: str
    size: int | None = Field(default=None, ge=0)
    blobId: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    lfs: _Lfs | None = None


class _Info(BaseModel):
    """Fields used from ``/api/models/NAME?blobs=true``."""

    model_config = ConfigDict(extra="ignore")
    sha: str = Field(pattern=r"^[0-9a-f]{40}$")
    siblings: list[_Sibling] = Field(max_length=MAX_FILES)
    gated: bool | str = False
    cardData: dict[str, Any] | None = None
    tags: list[str] = Field(default_factory=list, max_length=10_000)


@dataclass(frozen=True)
class RepoFile:
    """A file of a commit.

    Attributes:
        path: Path in the repository, with forward slashes.
        size_bytes: Size of the content.
        sha256: SHA-256 of the content; None for a small file, which is stored in git itself.
        blob_sha1: Git blob id of a small file: the SHA-1 of ``blob SIZE\\0`` and the content.
    """

    path: str
    size_bytes: int
    sha256: str | None
    blob_sha1: str | None

    @property
    def digest(self) -> str:
        """The expected checksum of the content, which is also the file's name in the cache."""
        digest = self.sha256 or self.blob_sha1
        assert digest is not None
        return digest

    def is_content(self, data: bytes) -> bool:
        """Return True if ``data`` is the content of this file."""
        if self.sha256 is not None:
            return hashlib.sha256(data).hexdigest() == self.sha256
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == self.blob_sha1


@dataclass(frozen=True)
class DownloadOffer:
    """A repository at one commit, with its files to download.

    Attributes:
        kind: ``model`` or ``dataset``.
        name: Requested name.
        commit: Commit to download, 40 hex digits; used even if the Hub has a newer one.
        files: Files of the snapshot.
        licence: Licence stated by the model card or a tag; None if there is none.
        gated: True if an account must accept terms first.
        missing_bytes: Number of bytes that are not on this machine yet.
        streamed: True if rows are streamed and nothing is stored.
        store: Folder of a partial download, not shared with other programs, which expect complete repositories; None
            for the Hugging Face cache.
    """

    kind: hub.Kind
    name: str
    commit: str
    files: tuple[RepoFile, ...]
    licence: str | None
    gated: bool
    missing_bytes: int
    streamed: bool = False
    store: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the files: ``store``, or the repository's folder in the Hugging Face cache."""
        return self.store or hub.storage(self.kind, self.name)

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def describe(self) -> str:
        """Describe the download in one line, for the user's consent."""
        size = readable_bytes(self.missing_bytes)
        if self.streamed:
            size = f"rows are streamed, {size} at most"
        elif self.missing_bytes < self.total_bytes:
            size = f"{size} of {readable_bytes(self.total_bytes)} are missing"
        return (
            f"{self.name} from {hub.endpoint()}, commit {self.commit[:12]}: {size}"
            f"{'' if self.streamed else ' in ' + counted(len(self.files), 'file')}, "
            f"licence: {self.licence or 'not stated'}"
        )

    def remedy(self) -> str:
        """Return the command-line remedy that gives consent without a terminal."""
        if self.kind == "dataset":
            return "confirm with --yes, or use files with path"
        return f"confirm with --yes, or fetch it first: gym models pull {self.name} --yes"


def offer_model(name: str) -> DownloadOffer:
    """Query the Hub for the model ``name``.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` with similar names; ``PERMISSION_DENIED`` for a gated model without access;
            ``UNAVAILABLE`` offline; ``MODEL_INVALID`` for a repository without usable weights or files.
    """
    info, listed = _read_info("model", name)
    if "config.json" not in listed and "adapter_config.json" not in listed:
        raise _unusable(name, "it has neither config.json nor adapter_config.json")
    if "config.json" in listed:
        _require_known_type(name, _read_json(name, info.sha, listed["config.json"]))
    else:
        _read_json(name, info.sha, listed["adapter_config.json"])
    index = weights_index(listed)
    shards = None
    if index is not None:
        weight_map = _read_json(name, info.sha, listed[index]).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
            raise _unusable(name, f"{index} has no weight_map")
        shards = set(weight_map.values())
        if unlisted := unlisted_shards(shards, listed):
            raise _unusable(name, f"{index} lists {plain(unlisted[0], 80)!r}, which is not in the repository")
    files = tuple(listed[path] for path in chosen_files(name, listed, shards))
    return _stored_offer("model", name, info, files, None)


def model_config(name: str) -> dict[str, Any]:
    """Read the ``config.json`` of a Hub model without storing it, for planning.

    Raises:
        GymError: Errors from ``offer_model``.
    """
    info, listed = _read_info("model", name)
    if "config.json" not in listed:
        raise _unusable(name, "it has no config.json")
    config = _read_json(name, info.sha, listed["config.json"])
    _require_known_type(name, config)
    return config


def offer_dataset(name: str, subset: str | None = None, commit: str | None = None) -> DownloadOffer:
    """Query the Hub for the dataset ``name``; with ``subset``, only the folder of that name counts, if it exists.

    Args:
        name: Repository name, ``owner/name``.
        subset: Name of a configuration of the dataset.
        commit: Commit to read; None for the newest.

    Raises:
        GymError: ``NOT_FOUND`` if it does not exist; ``STALE`` for a commit that the Hub no longer has; other errors
            of ``offer_model``.
    """
    info, listed = _read_info("dataset", name, commit)
    in_subset = [file for path, file in listed.items() if subset in PurePosixPath(path).parts[:-1]]
    files = tuple(in_subset or listed.values())
    size = sum(file.size_bytes for file in files)
    gated = info.gated is not False
    return DownloadOffer("dataset", name, info.sha, files, _licence(info), gated, size, streamed=True)


def offer_dataset_files(
    name: str, choose: Callable[[Collection[str]], Iterable[str]], store: Path, commit: str | None = None
) -> DownloadOffer:
    """Query the Hub for selected files of a dataset, to be downloaded into a separate folder.

    Args:
        name: Repository name, ``owner/name``.
        choose: Selects the paths to download from all paths.
        store: Folder of the download.
        commit: Commit to read; None for the newest.

    Raises:
        GymError: Errors from ``offer_dataset``.
    """
    info, listed = _read_info("dataset", name, commit)
    files = tuple(listed[path] for path in dict.fromkeys(choose(listed)))
    return _stored_offer("dataset", name, info, files, store)


def _stored_offer(
    kind: hub.Kind, name: str, info: _Info, files: tuple[RepoFile, ...], store: Path | None
) -> DownloadOffer:
    blobs = (store or hub.storage(kind, name)) / "blobs"
    missing = sum(file.size_bytes for file in files if not (blobs / file.digest).is_file())
    gated = info.gated is not False
    return DownloadOffer(kind, name, info.sha, files, _licence(info), gated, missing, store=store)


def _read_info(kind: hub.Kind, name: str, commit: str | None = None) -> tuple[_Info, dict[str, RepoFile]]:
    """Read the Hub's description of a commit and its files by path; the newest commit by default."""
    place = f"api/{kind}s/{name}{f'/revision/{commit}' if commit else ''}?blobs=true"
    text = hub.read(place, kind, name, limit=hub.MAX_INFO_BYTES)
    try:
        info = _Info.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = plain(".".join(map(str, first["loc"])) or "the whole", 80)
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{name}: {hub.endpoint()} returned an invalid description of it: {place}: {plain(first['msg'], 120)}",
            "check HF_ENDPOINT; " + hub.alternatives(kind, name),
        ) from error
    if commit is not None and info.sha != commit:
        raise GymError(
            ErrorCode.STALE,
            f"{name}: requested commit {commit[:12]}, but {hub.endpoint()} describes {info.sha[:12]}",
            "check HF_ENDPOINT, or run the same command again",
        )
    listed: dict[str, RepoFile] = {}
    for sibling in info.siblings:
        path = sibling.rfilename
        if not is_safe_path(path):
            raise _unusable(name, f"its file {plain(path, 80)!r} is not a safe path on every system")
        size = sibling.lfs.size if sibling.lfs is not None else sibling.size
        if size is None or (sibling.lfs is None and sibling.blobId is None):
            raise _unusable(name, f"the Hub gives no size or checksum for {plain(path, 80)}")
        sha256 = None if sibling.lfs is None else sibling.lfs.sha256
        listed[path] = RepoFile(path, size, sha256, sibling.blobId)
    return info, listed


def _read_json(name: str, commit: str, file: RepoFile) -> dict[str, Any]:
    """Read a small file of the repository before the offer is made."""
    if file.size_bytes > MAX_SMALL_BYTES:
        raise _unusable(name, f"{file.path} has {readable_bytes(file.size_bytes)}")
    data = hub.read(f"{name}/resolve/{commit}/{file.path}", "model", name, limit=MAX_SMALL_BYTES)
    if not file.is_content(data):  # the content must be what will be loaded later
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{file.path} of {name}: {hub.endpoint()} sent a file that does not match its stated checksum",
            "try later, from another network, or with another HF_ENDPOINT",
        )
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unusable(name, f"{file.path} is not JSON: {plain(error, 120)}") from error
    if not isinstance(content, dict):
        raise _unusable(name, f"{file.path} is not a JSON object")
    return content


def _require_known_type(name: str, config: dict[str, Any]) -> None:
    """Reject a model that requires its own code, before downloading gigabytes."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise _unusable(
            name,
            f"its model_type {plain(kind, 60)!r} is unknown to transformers {transformers.__version__}",
            "code that comes with a model is never run; choose a model that transformers supports",
        )


def _licence(info: _Info) -> str | None:
    """Return the licence from the card (``license_name`` for custom ones), or else from a ``license:`` tag."""
    card = info.cardData or {}
    licence = card.get("license")
    if isinstance(licence, list):
        licence = ", ".join(str(name) for name in licence[:10])
    if licence == "other" and card.get("license_name"):
        licence = card["license_name"]
    if not licence:
        tags = (tag.removeprefix("license:") for tag in info.tags if tag.startswith("license:"))
        licence = next(tags, None)
    return plain(re.sub(r"\s+", " ", str(licence)), 80) if licence else None


def _unusable(
    name: str, why: str, hint: str = "choose another repository, or use a model folder"
) -> GymError:
    return GymError(ErrorCode.MODEL_INVALID, f"{name}: cannot be used from the Hub: {why}", hint)
