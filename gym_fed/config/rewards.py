"""The graders that reward answers: the ``rewards`` list of a config, one entry a grader."""

from __future__ import annotations

from pydantic import Field

from gym_fed.config.base import StrictModel


class GraderConfig(StrictModel):
    """One grader and its weight in the sum."""

    grader: str
    """A registered grader: the name of a file in ``gym_fed/evaluation/graders``."""

    weight: float = Field(default=1.0)


class RewardSections(StrictModel):
    """Keys of the YAML's top level."""

    rewards: list[GraderConfig] = Field(default_factory=list)
    """What rewards an answer, for ``ppo``, ``grpo``, ``gspo`` and ``rloo``; the rewards are summed by weight."""
