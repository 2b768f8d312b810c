"""The manifest of a snapshot: what belongs to it, by sha256, and which state of the ledger it is of."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from gym_fed.config.base import StrictModel
from gym_fed.config.problems import first_problem
from gym_fed.errors import ErrorCode, GymError
from gym_fed.ledger.heads import SignedHead

MANIFEST = "manifest.json"
DATABASE = "database"
"""Name of the database's copy in a snapshot: an SQLite file, or an archive of pg_dump."""
_PLAIN = re.compile(r"[^/\x00]+(/[^/\x00]+)*")


class File(StrictModel):
    """A file of a snapshot."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)


class SnapshotManifest(StrictModel):
    """Written last: a snapshot without one is none."""

    format: Literal["gym-backup-1"] = "gym-backup-1"
    server: str = Field(pattern=r"^s[0-9a-f]{16}$")
    created_at: int
    software_version: str
    database: Literal["sqlite", "postgresql"]
    head: dict[str, Any] | None
    """The newest signed head of the ledger in the database's copy; None for a ledger without an entry."""
    files: dict[str, File]
    """By path inside the hub's folder; ``DATABASE`` stands for the database."""
    objects: dict[str, int]
    """Size by sha256."""

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            if not _PLAIN.fullmatch(name) or {".", ".."} & set(name.split("/")):
                raise ValueError(f"{name!r} is no path inside a folder")
        return files

    @property
    def signed_head(self) -> SignedHead | None:
        """``head``, parsed."""
        return None if self.head is None else SignedHead.from_dict(self.head)

    @property
    def size(self) -> int:
        """How many entries the ledger has."""
        head = self.signed_head
        return 0 if head is None else head.size

    @classmethod
    def from_dict(cls, document: Any) -> SnapshotManifest:
        """Raises ``STATE_CORRUPT`` for what is no manifest."""
        try:
            found = cls.model_validate(document)
            _ = found.signed_head
        except (ValidationError, GymError) as error:
            what = first_problem(error) if isinstance(error, ValidationError) else error.message
            raise GymError(ErrorCode.STATE_CORRUPT, f"the manifest of a backup: {what}") from error
        return found
