"""Settings of the algorithms that learn from a teacher model; names are TRL's."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.compute import Dtype


class TeacherSettings(StrictModel):
    """The teacher model, which is never changed."""

    teacher: str
    """A model name or folder, as for ``model``."""

    teacher_dtype: Dtype | None = None
    """Type of the teacher's weights; by default ``dtype``."""


class DistillationSettings(TeacherSettings):
    """Settings of GKD, Agarwal et al. 2024, which matches the teacher's distributions. Vocabularies must be equal."""

    beta: float = Field(default=0.0, ge=0, le=1)
    """The divergence: 0 is forward KL (teacher to student), 1 reverse KL; between them the generalised
    Jensen-Shannon divergence, 0.5 being the symmetric one."""

    temperature: float = Field(default=1.0, gt=0)
    """Both distributions are softened by it, and the student's own answers (``lmbda``) are drawn at it."""

    lmbda: float = Field(default=0.0, ge=0, le=1)
    """Share of batches in which the student answers the prompts itself and is corrected on its own words
    (on-policy); in the others the words are the data's."""

    max_completion_length: int = Field(default=64, ge=1)
    """Longest answer that the student writes when ``lmbda`` is above 0, in tokens."""


class SequenceDistillationSettings(TeacherSettings):
    """Settings of training on the teacher's answers, Kim and Rush 2016. Vocabularies may differ."""

    max_completion_length: int = Field(default=64, ge=1)
    """Longest answer of the teacher, in tokens; prompts whose answer does not end within it are left out."""

    temperature: float = Field(default=0.0, ge=0)
    """0 takes the likeliest token each time; above it, answers are drawn by the seed."""

    teacher_batch_size: int = Field(default=64, ge=1)
    """Prompts that the teacher answers at once."""
