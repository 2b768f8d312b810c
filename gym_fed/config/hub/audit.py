"""Settings of audits: an auditor repeats single training steps of an update and compares the results."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.text import counted

MAX_AUDITED_STEPS = 10_000
"""Maximum number of steps of an audited training run: verification of the ledger computes one hash per step."""


class AuditTerms(StrictModel):
    """The part of the audit settings that a contributor agrees to; every task of the hub contains it."""

    rows: Literal["public", "disclosed"]
    """Whose rows can be audited: ``public`` rows, which the auditor has as well, or rows that the contributor agrees to
    send to the auditor (``disclosed``). Private rows cannot be audited."""
    rate: float = Field(0.1, gt=0, le=1)
    """Fraction of a round's updates that are drawn."""
    steps: int = Field(2, ge=1, le=64)
    """Number of training steps to repeat per drawn update."""
    tolerance: float = Field(1e-3, gt=0, le=0.1)
    """Maximum difference between a repeated step and the contributor's, as a fraction of the step."""
    answer_seconds: float = Field(7 * 86400, ge=60)
    """Time within which the contributor of a drawn update must answer, and keeps its training states."""

    def values_by_key(self) -> dict[str, Any]:
        """Return all values by dotted key, such as ``audit.rate``."""
        return {f"audit.{key}": value for key, value in self.model_dump(mode="json").items()}

    def in_words(self) -> str:
        """Describe the terms in one line."""
        which = "public" if self.rows == "public" else "disclosed"
        return (
            f"for {self.rate:.0%} of the updates an auditor gets the rows ({which}) and the states of "
            f"{counted(self.steps, 'step')}"
        )


class AuditConfig(AuditTerms):
    """Audits of LoRA updates; by default none. The contributors' rows must be public, or disclosed to the auditors."""

    auditors: list[str] = Field(min_length=1, max_length=64)
    """Ids of the accounts whose signed verdicts the hub records; ``gym-client id`` prints them."""

    def terms(self) -> AuditTerms:
        """Return the part that a contributor agrees to."""
        return AuditTerms(**self.model_dump(exclude={"auditors"}))
