"""Mirrors listed by a hub: machines that serve its public objects, run by people whom the coordinator trusts."""

from __future__ import annotations

from pydantic import Field, field_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.endpoint import Endpoint

MAX_MIRRORS = 16
LEAST_PORT = 1024
"""Minimum port of a mirror, so that contributors cannot be directed to other services."""


class MirrorConfig(StrictModel):
    """A mirror, as ``gym-server mirror`` prints it."""

    address: str = Field(max_length=270)
    """Address as host:port."""
    fingerprint: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """Fingerprint of its TLS key."""

    @field_validator("address")
    @classmethod
    def _validate_address(cls, text: str) -> str:
        if Endpoint.parse(text, least_port=LEAST_PORT).is_everywhere:
            raise ValueError(f"nobody can connect to {text}; give the host name that contributors use")
        return text
