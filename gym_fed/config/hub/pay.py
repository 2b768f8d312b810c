"""The terms of pay, as a hub announces them and as a round's task fixes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gym_fed.config.schema.base import StrictModel

_MAX_OPTIONS = 32


# Sums of credits stay whole numbers of 53 bits, which every JSON reader and database can count.
MAX_AMOUNT = 10**9
"""Limit of one round, or of one report of usage."""

MAX_ROYALTIES = 2**52
"""Limit of all reports together; added to the credits of four million rounds, a sum still has 53 bits."""


class PayTerms(StrictModel):
    """The pay of a round; keys as in ``rewards`` of a hub's config."""

    pool: int = Field(ge=0, le=MAX_AMOUNT)
    score: str = Field(max_length=120)
    score_options: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, max_length=_MAX_OPTIONS
    )
    quality_weight: float = Field(ge=0, le=1)
    credits_per_nat: float = Field(gt=0, le=MAX_AMOUNT)
    participation_ramp: bool
    score_on: Literal["loss", "evals"] = "loss"
    evals_share: float = Field(ge=0, le=1)

    def values_by_key(self) -> dict[str, Any]:
        """Return every value by its dotted key, such as ``pay.pool``."""
        return {f"pay.{key}": value for key, value in self.model_dump(mode="json").items()}

    def in_words(self) -> str:
        """Describe the terms in one line."""
        pool = f"{self.pool:,} credits a round"
        if self.quality_weight == 0.0:
            return f"{pool}, shared by all who are merged; contributions are not measured"
        rest = (
            f", {1 - self.quality_weight:.0%} shared by all who are merged" if self.quality_weight < 1 else ""
        )
        return (
            f"at most {pool} and {self.credits_per_nat:,.0f} per nat of held-out loss that is certainly gained: "
            f"{self.quality_weight:.0%} by {self.score}{rest}"
        )
