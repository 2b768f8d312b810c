"""The folder through which a regional hub and its agent for the root, two separate processes, communicate.

The agent writes ``root.json``, the root's version from which the region must start, and the receipts of sent updates.
The hub writes ``region.json``, the region's newest version since then. Files are replaced atomically and contain
digests of the objects next to them, so either process can be killed at any point.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, fsync_folder, make_folder, write_atomically
from gym_fed.core.json_files import read_object
from gym_fed.trust.identity.manifest import Sha256
from gym_fed.trust.identity.statements import PublicKeyHex

FOLDER = "region"
"""Name of the exchange's folder in a hub's folder."""

_DIGEST = r"^sha256:[0-9a-f]{64}$"
_SUFFIX = ".gymdelta"
_ROOT, _REGION, _RECEIPTS = "root.json", "region.json", "receipts"
_REFUSED = ".refused"

ServerId = Annotated[str, Field(pattern=r"^s[0-9a-f]{16}$")]
Digest = Annotated[str, Field(pattern=_DIGEST)]


class SummedVersion(StrictModel):
    """A version as the base plus an integer sum of soups (``gym_fed.delta.integer_sum``); the base has no sum."""

    base_digest: Digest
    version_digest: Digest
    integers: Digest | None = None
    """Digest of the sum."""
    sum_sha256: Sha256 | None = None
    """SHA-256 of the file with the sum, in the exchange's folder."""

    @model_validator(mode="after")
    def _validate_sum(self) -> SummedVersion:
        is_base = self.version_digest == self.base_digest
        if (self.integers is None) != is_base or (self.sum_sha256 is None) != is_base:
            raise ValueError("integers and sum_sha256 are required for every version but the base")
        return self


class RootVersion(SummedVersion):
    """The root's version from which the region must start."""

    format: Literal["gym-root-version-1"] = "gym-root-version-1"
    root: ServerId
    root_key: PublicKeyHex
    """The key that signs the root's ledger; ``root`` is derived from it."""
    root_round: int = Field(ge=0)
    """The root's round with this task; 0 for the last version, after all rounds."""
    root_size: int = Field(ge=0)
    """Number of entries in the root's ledger under a signed head seen by the agent, including the version's entry."""
    is_last: bool = False
    """True if the root has no more rounds."""


class RegionVersion(SummedVersion):
    """The region's newest version since it started from a version of the root."""

    format: Literal["gym-region-version-1"] = "gym-region-version-1"
    server: ServerId
    root_version: Digest
    """Digest of the root's version from which the region started."""
    num_rounds: int = Field(ge=0)
    """Number of rounds committed since then."""
    max_rounds: int = Field(ge=1)
    """Number of rounds after which the region waits for the root."""
    num_updates: int = Field(ge=0)
    num_examples: int = Field(ge=0)
    """Total examples of all members whose updates were merged since then, with each member's maximum in one round."""


Document = TypeVar("Document", bound=StrictModel)


class RegionExchange:
    """The exchange of one regional hub.

    Args:
        hub_folder: The hub's folder.
    """

    def __init__(self, hub_folder: Path) -> None:
        self.folder = hub_folder / FOLDER

    def root_version(self) -> RootVersion | None:
        """Return the root's version; None if the agent has not written one yet.

        Raises:
            GymError: ``STATE_CORRUPT`` with the file and what is wrong with it.
        """
        return self._read(_ROOT, RootVersion)

    def region_version(self) -> RegionVersion | None:
        """Return the region's newest version; None if there is none yet. Raises the errors of ``root_version``."""
        return self._read(_REGION, RegionVersion)

    def put_root_version(self, version: RootVersion, sum_path: Path | None) -> None:
        """Write the root's version and a copy of its sum."""
        self._put(_ROOT, version, sum_path)

    def put_region_version(self, version: RegionVersion, sum_path: Path | None) -> None:
        """Write the region's version and a copy of its sum."""
        self._put(_REGION, version, sum_path)

    def sum_path(self, version: SummedVersion) -> Path | None:
        """Return the verified file with the sum of a version; None for the base.

        Raises:
            GymError: ``HASH_MISMATCH``; ``STATE_CORRUPT`` if the file is missing.
        """
        if version.sum_sha256 is None:
            return None
        path = self._object(version.sum_sha256)
        if not path.is_file():
            raise GymError(ErrorCode.STATE_CORRUPT, f"{path} is missing", _REMEDY)
        if (found := file_sha256(path)) != version.sum_sha256:
            raise GymError(ErrorCode.HASH_MISMATCH, f"{path} has sha256 {found}", _REMEDY)
        return path

    def put_receipt(self, receipt: dict[str, Any]) -> None:
        """Store the root's receipt of an update, for the hub to record in its ledger."""
        folder = self.folder / _RECEIPTS
        make_folder(folder, 0o700)
        write_atomically(folder / f"{receipt['update']}.json", json.dumps(receipt, sort_keys=True).encode())

    def receipts(self) -> list[Path]:
        """List the files of the receipts that are stored for the hub."""
        return sorted((self.folder / _RECEIPTS).glob("*.json"))

    def receipt(self, path: Path) -> dict[str, Any]:
        """Read a receipt that is stored for the hub; raises the errors of ``root_version``."""
        return read_object(path, ErrorCode.STATE_CORRUPT, _REMEDY)

    def set_aside(self, path: Path) -> Path:
        """Rename a receipt that cannot be recorded, so that it does not block others. Return its new path."""
        return path.replace(path.with_suffix(_REFUSED))

    def _object(self, sha256: str) -> Path:
        return self.folder / f"{sha256}{_SUFFIX}"

    def _read(self, name: str, schema: type[Document]) -> Document | None:
        path = self.folder / name
        if not path.exists():
            return None
        values = read_object(path, ErrorCode.STATE_CORRUPT, _REMEDY)
        try:
            return schema.model_validate(values)
        except ValidationError as error:
            problem = f"{path}: {first_problem(error)}"
            raise GymError(ErrorCode.STATE_CORRUPT, problem, _REMEDY) from error

    def _put(self, name: str, version: SummedVersion, sum_path: Path | None) -> None:
        make_folder(self.folder, 0o700)
        if version.sum_sha256 is not None and sum_path is not None:
            target = self._object(version.sum_sha256)
            part = target.with_suffix(".part")
            shutil.copyfile(sum_path, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, target)
            fsync_folder(self.folder)
        write_atomically(self.folder / name, version.model_dump_json(indent=1).encode())
        self._drop_others()

    def _drop_others(self) -> None:
        """Delete the objects that neither of the two documents refers to."""
        named = {one.sum_sha256 for one in (self.root_version(), self.region_version()) if one is not None}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if path.stem not in named:
                path.unlink(missing_ok=True)


_REMEDY = "delete the hub's folder `region`; the agent at the root writes it again"
