"""Settings of the algorithms that make a model forget the rows with ``role: forget`` and keep the others."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.schema.base import StrictModel


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
    """The larger, the sooner a row whose probability has fallen pushes no further; towards 0 it is gradient ascent."""
