"""The folder of a mirror, shared by two processes: one follows the hub and writes, the other serves the content.

``content.json`` lists what has been verified and may be served. It is replaced atomically after the objects and the
ledger are on disk, so a mirror that was killed still serves the previous content.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.json_files import read_object
from gym_fed.trust.identity.manifest import Sha256
from gym_fed.trust.identity.statements import PublicKeyHex

_CONTENT = "content.json"


class MirrorContent(StrictModel):
    """The content that a mirror may serve."""

    format: Literal["gym-mirror-1"] = "gym-mirror-1"
    server: str = Field(pattern=r"^s[0-9a-f]{16}$")
    """Id of the hub."""
    ledger_key: PublicKeyHex
    hub: str = Field(max_length=300)
    """Address of the hub."""
    entries: int = Field(ge=0)
    """Number of entries in the ledger, all under a signed head."""
    objects: dict[Sha256, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """The sizes of the public objects in bytes, by SHA-256."""
    variants: list[str] = Field(default_factory=list)
    """The public variants, by owner and name, as ``VariantInfo`` messages in hex."""
    halted: str = Field("", max_length=2000)
    """The reason why the hub is no longer followed: it showed two ledgers, an older one, or a different key."""


class MirrorFolder:
    """The files of a mirror.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.objects = path / "objects"
        self.home = path / "home"
        """The home of the mirror's account on the hub, with its copy of the ledger and evidence in ``proofs/``."""
        self.keys = path / "keys"

    @property
    def content_path(self) -> Path:
        return self.path / _CONTENT

    def ledger_path(self, server: str) -> Path:
        """Return the path of the verified copy of a hub's ledger."""
        return self.home / "servers" / server / "ledger.jsonl"

    def content(self) -> MirrorContent | None:
        """Return the content that may be served; None if nothing has been verified yet.

        Raises:
            GymError: ``STATE_CORRUPT`` with the file and what is wrong with it.
        """
        if not self.content_path.exists():
            return None
        hint = "delete it; the mirror writes it again"
        values = read_object(self.content_path, ErrorCode.STATE_CORRUPT, hint)
        try:
            return MirrorContent.model_validate(values)
        except ValidationError as error:
            problem = f"{self.content_path}: {first_problem(error)}"
            raise GymError(ErrorCode.STATE_CORRUPT, problem, hint) from error

    def put(self, content: MirrorContent) -> None:
        """Replace the content that may be served."""
        write_atomically(self.content_path, content.model_dump_json(indent=1).encode())
