"""The signed list of a hub's mirrors, which contributors see before they join."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError

from gym_fed.config.hub.mirrors import MAX_MIRRORS, MirrorConfig
from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, server_id, verify_signature


class SignedMirrors(StrictModel):
    """The mirrors of one hub, signed with its ledger key."""

    server: str = Field(pattern=r"^s[0-9a-f]{16}$")
    mirrors: list[MirrorConfig] = Field(max_length=MAX_MIRRORS)
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @classmethod
    def sign(cls, key: SigningKey, mirrors: list[MirrorConfig]) -> SignedMirrors:
        """Sign the list."""
        server = server_id(key.public_key)
        return cls(server=server, mirrors=mirrors, signature=key.sign(_signed(server, mirrors)).hex())

    @classmethod
    def verified(cls, values: Any, public_key: bytes) -> SignedMirrors:
        """Parse and verify a hub's list.

        Raises:
            GymError: ``SIGNATURE_INVALID`` if the list is malformed or was not signed by the hub with this key.
        """
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            problem = f"the hub's list of mirrors: {first_problem(error)}"
            raise GymError(ErrorCode.SIGNATURE_INVALID, problem) from error
        if found.server != server_id(public_key):
            raise GymError(ErrorCode.SIGNATURE_INVALID, f"the list of mirrors is that of hub {found.server}")
        verify_signature(public_key, _signed(found.server, found.mirrors), bytes.fromhex(found.signature))
        return found


def _signed(server: str, mirrors: list[MirrorConfig]) -> dict[str, Any]:
    return {"mirrors": [mirror.model_dump(mode="json") for mirror in mirrors], "server": server}
