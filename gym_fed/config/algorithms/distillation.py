"""Settings of the algorithms that learn from a teacher model."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.base import StrictModel


class DistillationSettings(StrictModel):
    """Matches the teacher's distribution at every token."""

    teacher: str
    """A model name or folder, as for ``model``; it must have the same vocabulary."""

    temperature: float = Field(default=1.0, gt=0)


class SequenceDistillationSettings(StrictModel):
    """Trains on answers that the teacher writes to the rows' prompts, Kim and Rush 2016."""

    teacher: str
    """A model name or folder, as for ``model``."""

    max_completion_length: int = Field(default=64, ge=1)
    """Longest answer of the teacher, in tokens."""
