"""Settings of seeding, in which contributors who allow it serve public objects to each other."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.schema.base import Problem, Problems, StrictModel


class SeedingConfig(StrictModel):
    """Seeding between contributors whose policies allow it (docs/seeding.md). They can learn each other's addresses."""

    min_bytes: int = Field(1 << 20, ge=1)
    """Objects smaller than this come from the hub."""
    hub_copies: int = Field(4, ge=1)
    """Maximum copies of an object that the hub sends at once to contributors who will seed it; others wait."""
    max_wait_seconds: float = Field(3600, ge=0)
    """Maximum time to wait for a seeder of one object, and in total for those of the base (docs/seeding.md)."""

    def idle_seconds(self, size_bytes: int) -> float:
        """Return the time to wait for a seeder of an object after the last contributor received it."""
        return min(self.max_wait_seconds, 10 + size_bytes / (256 << 10))

    def wait_seconds(self, size_bytes: int) -> float:
        """Return the total time to wait for a seeder of an object."""
        return min(self.max_wait_seconds, 4 * self.idle_seconds(size_bytes))


class SeedingTerms(StrictModel):
    """The part of the settings that contributors see before they join."""

    min_bytes: int = Field(ge=1)

    @classmethod
    def of(cls, config: SeedingConfig) -> SeedingTerms:
        """Return the announced part of a hub's settings."""
        return cls(min_bytes=config.min_bytes)


def check_seeding(seeding: SeedingConfig | None, hidden_by: str) -> None:
    """Raise ``Problems`` if rounds hide who contributes, which seeding shows to other members.

    Args:
        seeding: The section; None if there is none.
        hidden_by: Name of the section that hides updates; empty if none does.
    """
    if seeding is not None and hidden_by:
        text = f"shows contributors each other's addresses, but {hidden_by} hides what they do; remove one of them"
        raise Problems("", [Problem("seeding", text)])
