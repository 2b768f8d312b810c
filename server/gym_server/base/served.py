"""The files of the base model that a hub serves, and the offer that contributors see before they join.

A base file is identified by its sha256 and fetched with ``Download``, like any other object, within the account's
limits. It is read from its original location. Contributors verify every file and the digest of all tensors.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gym_fed.base.files import REDISTRIBUTABLE, BaseFile, check_listing, licence_of, listing_sha256, names_in
from gym_fed.base.models import NANO, is_hub_name, resolve
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.core.text import counted, plain, readable_bytes
from gym_fed.delta.base import BaseSpec, digests_by_tensor
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.store.database import Database

_PARTS = 1_000
"""Number of files or tensors per message, which keeps messages far below the size limit."""
_PUBLIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


class ServedBase:
    """The base model that a hub offers to its contributors.

    Attributes:
        files: The served files; empty if nothing is served.
        licence: The licence in the model card; empty if it names none.
        why_not: Reason why nothing is served; empty if files are served.
        public_name: Name on the Hugging Face Hub, if the config names the base by it.
        commit: Commit on the Hugging Face Hub from which the files were downloaded.
    """

    def __init__(self, config: ServerConfig, base: BaseSpec, database: Database) -> None:
        """Find the files that may be served, and hash those that changed since the last start.

        Raises:
            GymError: ``CONFIG_INVALID`` for ``serve_base: true`` with a base that cannot be served.
        """
        self._config, self._base = config, base
        self._database = database
        self.files: tuple[BaseFile, ...] = ()
        self.licence = self.why_not = self.public_name = self.commit = ""
        self._paths: dict[str, Path] = {}
        self._parts: list[pb.BasePart] | None = None
        named = config.base_model
        if named == NANO:
            self.why_not = f"{NANO} comes with gym-fed"
            return
        try:
            folder = Path(resolve(named))
        except GymError as error:
            self._cannot(error)
            return
        self.licence = licence_of(folder)
        if is_hub_name(named) and _PUBLIC.fullmatch(named):
            self.public_name = named
            self.commit = folder.name if _COMMIT.fullmatch(folder.name) else ""
        if config.serve_base is False:
            self.why_not = "serve_base is false"
        elif config.serve_base == "auto" and self.licence not in REDISTRIBUTABLE:
            reason = (
                f"its licence is {plain(self.licence, 80)}"
                if self.licence
                else "its model card has no licence"
            )
            self.why_not = f"{reason}; set serve_base: true if you may redistribute the base"
        else:
            self._take(folder)

    def path_of(self, sha256: str) -> Path | None:
        """Return the file of the base with this sha256, if it is served."""
        return self._paths.get(sha256)

    @property
    def num_bytes(self) -> int:
        """Return the total size of the served files, in bytes."""
        return sum(file.size_bytes for file in self.files)

    def offer_json(self) -> str:
        """Return ``StatusReply.base_json``; empty if there is nothing to offer."""
        if not self.files and not self.public_name:
            return ""
        offer: dict[str, Any] = {"licence": self.licence}
        if self.files:
            offer |= {
                "bytes": self.num_bytes,
                "files": len(self.files),
                "listing_sha256": listing_sha256(self.files),
            }
        if self.public_name:
            offer |= {"public_name": self.public_name, "commit": self.commit}
        return json.dumps(offer)

    def parts(self) -> list[pb.BasePart]:
        """Return the messages that answer ``Base``."""
        if self._parts is None:
            files = [pb.BaseFile(name=f.name, size_bytes=f.size_bytes, sha256=f.sha256) for f in self.files]
            found = [pb.BasePart(files=files[at : at + _PARTS]) for at in range(0, len(files), _PARTS)]
            digests = sorted(tensor_digests(self._base, self._database).items())
            tensors = [pb.BaseTensor(name=name, digest=digest) for name, digest in digests]
            found += [pb.BasePart(tensors=tensors[at : at + _PARTS]) for at in range(0, len(tensors), _PARTS)]
            self._parts = found
        return self._parts

    def line(self) -> str:
        """Return the line about the base that is printed when the hub starts."""
        if not self.files:
            return f"the base is not served to contributors who lack it: {self.why_not}"
        size, licence = readable_bytes(self.num_bytes), self.licence or "licence unknown"
        files = counted(len(self.files), "file")
        return f"contributors who lack the base are offered it: {size}, {files}, {plain(licence, 80)}"

    def _take(self, folder: Path) -> None:
        try:
            files = [self._file(folder / name) for name in names_in(folder)]
            check_listing(files, str(folder))
        except GymError as error:
            self._cannot(error)
            return
        self.files = tuple(files)
        self._paths = {file.sha256: folder / file.name for file in files}

    def _cannot(self, error: GymError) -> None:
        if self._config.serve_base is True:
            what = f"serve_base: {error.message}"
            raise GymError(ErrorCode.CONFIG_INVALID, what, "set serve_base: false") from error
        self.why_not = error.message

    def _file(self, path: Path) -> BaseFile:
        """Return a file's listing entry; hash it again only if its size or time changed."""
        found = path.stat()
        key, stamp = f"base_file:{path}", f"{found.st_size} {found.st_mtime_ns}"
        known, _, sha256 = self._database.setting(key, "").rpartition(" ")
        if known != stamp:
            sha256 = file_sha256(path)
            self._database.set(key, f"{stamp} {sha256}")
        return BaseFile(path.name, found.st_size, sha256)


def record_tensors(base: BaseSpec, database: Database, model: Any) -> None:
    """Store the digests of the base's tensors once, computed from ``model``, whose weights must be the base's."""
    if not database.setting(_key(base), ""):
        digests = {name: digest.hex() for name, digest in digests_by_tensor(model).items()}
        database.set(_key(base), json.dumps(digests))


def tensor_digests(base: BaseSpec, database: Database) -> dict[str, bytes]:
    """Return the digests of the base's tensors by name; empty if no round of this hub has loaded the model yet."""
    stored = database.setting(_key(base), "") or "{}"
    return {name: bytes.fromhex(digest) for name, digest in json.loads(stored).items()}


def _key(base: BaseSpec) -> str:
    return f"base_tensors:{base.digest}"
