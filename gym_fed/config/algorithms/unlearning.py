"""Settings of the algorithms that make a model forget the rows of ``role: forget`` and keep the others."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.base import StrictModel


class GradientDifferenceSettings(StrictModel):
    """Ascends on what is to be forgotten and descends on what is to be kept, Liu et al. 2022."""

    retain_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss on rows to keep."""


class NpoSettings(StrictModel):
    """Negative preference optimisation, Zhang et al. 2024."""

    beta: float = Field(default=0.1, gt=0)
    retain_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss on rows to keep."""
