"""Settings of SFT's loss, and of algorithms that learn or forget rows: distillation and unlearning; names are TRL's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.compute import Dtype


class SftSettings(StrictModel):
    """The next-token loss of ``sft``; models that read images use ``nll``."""

    loss_type: Literal["nll", "dft", "eaft", "asft"] = "nll"
    """``dft`` weighs a token by its own probability (Wu et al. 2025, "Dynamic Fine-Tuning"). ``eaft`` weighs it by how
    unsure the model is there (Diao et al. 2026, "Entropy-Adaptive Fine-Tuning"), and costs a second forward pass.
    ``asft`` is ``dft`` and a KL divergence from the model at the start, or from ``reference_model`` (Zhu et al. 2025,
    "Anchored Supervised Fine-Tuning")."""

    eaft_alpha: float = Field(default=1.0, gt=0)
    """For ``eaft``: the power of that weight."""

    asft_alpha: float = Field(default=0.1, ge=0)
    """For ``asft``: the weight of the divergence."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """For ``nll``: share of every target that is spread evenly over the vocabulary (Szegedy et al. 2016)."""

    @model_validator(mode="after")
    def _validate_loss_type(self) -> SftSettings:
        if self.eaft_alpha != 1.0 and self.loss_type != "eaft":
            raise ValueError(f"eaft_alpha: is read by loss_type eaft, not by {self.loss_type}")
        if self.asft_alpha != 0.1 and self.loss_type != "asft":
            raise ValueError(f"asft_alpha: is read by loss_type asft, not by {self.loss_type}")
        if self.label_smoothing and self.loss_type != "nll":
            raise ValueError(f"label_smoothing: is read by loss_type nll, not by {self.loss_type}")
        return self


class SupervisedSections(StrictModel):
    """The section of training on one machine; rounds of a hub use ``nll``."""

    sft: SftSettings | None = None


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
    """Temperature of both distributions, and of the student's own answers (``lmbda``)."""

    lmbda: float = Field(default=0.0, ge=0, le=1)
    """Share of batches in which the student generates the answers itself (on-policy); the others use the data's."""

    max_completion_length: int = Field(default=64, ge=1)
    """Longest answer that the student writes when ``lmbda`` is above 0, in tokens."""


class SequenceDistillationSettings(TeacherSettings):
    """Settings of training on the teacher's answers, Kim and Rush 2016. Vocabularies may differ."""

    max_completion_length: int = Field(default=64, ge=1)
    """Longest answer of the teacher, in tokens; prompts whose answer does not end within it are left out."""

    temperature: float = Field(default=0.0, ge=0)
    """0 = greedy; above 0, answers are sampled by the seed."""

    teacher_batch_size: int = Field(default=64, ge=1)
    """Prompts that the teacher answers at once."""


class UnlearningSettings(StrictModel):
    """The common keys. Every batch holds as many rows to forget as rows to keep."""

    retain_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss on rows to keep; 0 needs none of them."""


class GradientDifferenceSettings(UnlearningSettings):
    """Settings of gradient ascent on rows to forget and descent on rows to keep, Liu et al. 2022."""

    forget_loss_cap: float | None = Field(default=None, gt=0)
    """Loss in nats per token at which a row counts as forgotten and no longer contributes. Without a cap, as in
    the paper, the loss has no bound and a long run ruins the model. Guessing evenly costs ln(vocabulary size)."""


class NpoSettings(UnlearningSettings):
    """Negative preference optimisation, Zhang et al. 2024."""

    beta: float = Field(default=0.1, gt=0)
    """With a larger value, the gradient of a row vanishes sooner as its probability falls; towards 0 it is gradient
    ascent."""
