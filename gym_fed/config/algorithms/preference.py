"""Settings of the algorithms that learn from preferences; names are TRL's."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.base import StrictModel


class RewardModelSettings(StrictModel):
    """A scalar head that scores the chosen answer above the rejected one."""

    center_rewards_coefficient: float | None = Field(default=None, ge=0)
    """Pulls mean rewards towards zero (Eisenstein et al. 2023, equation 2); TRL's recommendation is 0.01."""


class DpoSettings(StrictModel):
    """Direct preference optimisation, Rafailov et al. 2023."""

    beta: float = Field(default=0.1, gt=0)
    """How closely the policy stays to the reference model; smaller moves further."""


class KtoSettings(StrictModel):
    """Kahneman-Tversky optimisation, Ethayarajh et al. 2024."""

    beta: float = Field(default=0.1, gt=0)


class OrpoSettings(StrictModel):
    """Odds-ratio preference optimisation, Hong et al. 2024."""

    beta: float = Field(default=0.1, gt=0)


class SimpoSettings(StrictModel):
    """Simple preference optimisation without a reference, Meng et al. 2024."""

    beta: float = Field(default=2.0, gt=0)
    gamma: float = Field(default=0.5, ge=0)
    """Margin by which the chosen answer's mean log-probability should lead, in units of 1 / beta."""


class TdpoSettings(StrictModel):
    """Token-level DPO, Zeng et al. 2024."""

    beta: float = Field(default=0.1, gt=0)
    alpha: float = Field(default=0.5, ge=0)
    """Weight of the sequential KL term (TDPO2)."""
