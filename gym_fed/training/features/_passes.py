"""What a run computes beside its training steps: features that act while training alone must be the same in it."""

from __future__ import annotations

from typing import Literal

from gym_fed.config.train.training import TrainingConfig
from gym_fed.kinds import ALGORITHMS, TUNING


def writes_answers(config: TrainingConfig) -> bool:
    """Whether the model that is trained writes answers that it learns from."""
    writes: bool = ALGORITHMS.type_of(config.algorithm).writes_answers(config)
    return writes


def reference_mode(config: TrainingConfig) -> Literal["training", "evaluation", "either"] | None:
    """How the model at the start is asked for log-probabilities that the policy's are held against; None without one.

    A frozen copy, and whatever is asked before the first step, is in evaluation mode; a model whose adapter is switched
    off for the moment is in that of the policy. Whether an adapter that does not start at zero is asked beforehand is
    known only when it is there: ``either``.
    """
    algorithm, tuning = ALGORITHMS.type_of(config.algorithm), TUNING.type_of(config.finetuning)
    if not algorithm.uses_reference:
        return None
    settings = config.chosen_sections().get(config.algorithm)
    beforehand = algorithm.scores_reference_once or getattr(settings, "precompute_ref_log_probs", None)
    if beforehand or not tuning.is_adapter:
        return "evaluation"
    return "training" if tuning.starts_as_base(config) else "either"
