"""Settings of supervised fine-tuning: the loss of a token."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel


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
