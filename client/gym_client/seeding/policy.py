"""The contributor's own seeding settings, a section of ``policy.yaml``."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, field_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.core.text import counted, readable_bytes

Kind = Literal["base", "soups"]
"""Kinds of objects that contributors serve to each other."""

LEAST_BYTES_PER_SECOND = 64 << 10
"""Rate in bytes per second below which a downloader gives up on a seeder."""

TOO_SLOW = "max_upload_bytes_per_second is below 64 KiB/s, at which downloaders give up"


class SeedingPolicy(StrictModel):
    """Fetch public objects from other contributors, and serve them with ``listen``.

    Every contributor of the hub can learn this machine's address, and what it serves.
    """

    listen: str | None = None
    """Address on which this machine serves others, such as ``0.0.0.0:9445``; absent: it serves nothing."""

    port: int | None = Field(default=None, ge=1024, le=65535)
    """External port that a router forwards to ``listen``, if it differs from the port of ``listen``."""

    max_bytes_per_second: int = Field(default=1 << 20, ge=LEAST_BYTES_PER_SECOND)
    """Maximum upload rate to all others together; ``max_upload_bytes_per_second`` also applies."""

    max_bytes_per_day: int = Field(default=10 << 30, ge=0)
    """Maximum number of bytes served per day (UTC)."""

    max_downloads: int = Field(default=2, ge=1, le=64)
    """Maximum downloads served at once. Few are better: a contributor that gets an object sooner serves it sooner."""

    max_disk_bytes: int = Field(default=1 << 30, ge=0)
    """Maximum total size in bytes of soups kept for serving."""

    serves: list[Kind] = Field(default_factory=lambda: list(get_args(Kind)))
    """Kinds of objects that are served: files of the base, and soups with their sums."""

    @field_validator("listen")
    @classmethod
    def _validate_listen(cls, text: str | None) -> str | None:
        if text is not None:
            Endpoint.parse(text, least_port=0)
        return text

    def slots(self, max_upload_bytes_per_second: int | None = None) -> int:
        """Return the number of concurrent downloads at which none is too slow for its downloader; 0 for none.

        Args:
            max_upload_bytes_per_second: The policy's limit for all uploads.
        """
        rate = self._rate(max_upload_bytes_per_second)
        if rate < LEAST_BYTES_PER_SECOND:
            return 0
        return max(1, min(self.max_downloads, rate // (2 * LEAST_BYTES_PER_SECOND)))

    def _rate(self, max_upload_bytes_per_second: int | None) -> int:
        return min(self.max_bytes_per_second, max_upload_bytes_per_second or self.max_bytes_per_second)

    def in_words(self, max_upload_bytes_per_second: int | None = None) -> list[str]:
        """Describe in words what seeding does on this machine."""
        slots = self.slots(max_upload_bytes_per_second)
        lines = [
            "fetches the base and soups from other contributors too; every contributor of the hub can learn this "
            "machine's address and what it serves"
        ]
        if self.listen is not None and not slots:
            lines.append(f"serves nothing: {TOO_SLOW}")
        elif self.listen is not None:
            kinds = " and ".join({"base": "the base", "soups": "soups"}[kind] for kind in self.serves)
            rate = readable_bytes(self._rate(max_upload_bytes_per_second))
            disk = (
                f", keeping {readable_bytes(self.max_disk_bytes)} of soups" if "soups" in self.serves else ""
            )
            lines.append(
                f"serves {kinds or 'nothing'} at {self.listen} to contributors with a ticket of the hub, up to "
                f"{counted(slots, 'download')} at once, {rate}/s and "
                f"{readable_bytes(self.max_bytes_per_day)} a day{disk}; never your data or updates"
            )
        return lines
