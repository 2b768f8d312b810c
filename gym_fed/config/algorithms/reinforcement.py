"""Settings of the algorithms that generate answers and learn from their rewards; names are TRL's."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.base import StrictModel


class RolloutSettings(StrictModel):
    """How answers are generated while learning."""

    num_generations: int = Field(default=8, ge=2)
    """Answers to each prompt; the batch must be a multiple of it."""

    max_completion_length: int = Field(default=64, ge=1)
    """Longest answer in tokens."""

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the model at the start; 0 needs no reference model."""


class GrpoSettings(RolloutSettings):
    """Group relative policy optimisation, Shao et al. 2024."""

    epsilon: float = Field(default=0.2, gt=0)


class GspoSettings(RolloutSettings):
    """Group sequence policy optimisation, Zheng et al. 2025: importance ratios of whole sequences."""

    epsilon: float = Field(default=3e-4, gt=0)
    epsilon_high: float = Field(default=4e-4, gt=0)


class RlooSettings(RolloutSettings):
    """REINFORCE leave-one-out, Ahmadian et al. 2024."""


class PpoSettings(RolloutSettings):
    """Proximal policy optimisation with a critic and GAE, Schulman et al. 2017 and 2016."""

    num_generations: int = Field(default=2, ge=1)
    epsilon: float = Field(default=0.2, gt=0)
