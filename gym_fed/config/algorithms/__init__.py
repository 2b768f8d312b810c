"""The settings of the training algorithms, each in a YAML section named after the algorithm."""

from __future__ import annotations

from gym_fed.config.algorithms.preference import (
    DpoSettings,
    KtoSettings,
    OrpoSettings,
    RewardModelSettings,
    SimpoSettings,
    TdpoSettings,
)
from gym_fed.config.algorithms.reinforcement import GrpoSettings, GspoSettings, PpoSettings, RlooSettings
from gym_fed.config.algorithms.supervised import (
    DistillationSettings,
    GradientDifferenceSettings,
    NpoSettings,
    SequenceDistillationSettings,
)
from gym_fed.config.schema.base import StrictModel


class AlgorithmSections(StrictModel):
    """The sections of algorithms. Only the section of the chosen ``algorithm`` may be set; its keys have defaults."""

    reward_model: RewardModelSettings | None = None
    dpo: DpoSettings | None = None
    kto: KtoSettings | None = None
    orpo: OrpoSettings | None = None
    simpo: SimpoSettings | None = None
    tdpo: TdpoSettings | None = None
    ppo: PpoSettings | None = None
    grpo: GrpoSettings | None = None
    gspo: GspoSettings | None = None
    rloo: RlooSettings | None = None
    distillation: DistillationSettings | None = None
    sequence_distillation: SequenceDistillationSettings | None = None
    gradient_difference: GradientDifferenceSettings | None = None
    npo: NpoSettings | None = None
