"""Settings of a regional hub, whose merged rounds are the updates of one contributor of another hub, its root."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gym_fed.config.schema.base import StrictModel


class RegionConfig(StrictModel):
    """Pass the merged rounds on to a root hub, by ``gym-client join --region`` (docs/coordinate.md).

    Members agree to the root: every task contains this section. ``rounds.num_rounds`` then counts rounds per
    version of the root.
    """

    root: str = Field(pattern=r"^s[0-9a-f]{16}$")
    """Id of the root hub, derived from the key that signs its ledger."""

    def values_by_key(self) -> dict[str, Any]:
        """Return all values by dotted key, such as ``region.root``."""
        return {f"region.{key}": value for key, value in self.model_dump(mode="json").items()}

    def in_words(self) -> str:
        """Describe the terms in one line."""
        return f"merged rounds are sent to root hub {self.root}"
