"""The forward passes of a run besides its training steps, in which training-only features must agree."""

from __future__ import annotations

from typing import Literal

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS, TUNING


def writes_answers(config: TrainingConfig) -> bool:
    """Return True if the trained model writes answers that it learns from."""
    writes: bool = ALGORITHMS.type_of(config.algorithm).writes_answers(config)
    return writes


def reference_mode(config: TrainingConfig) -> Literal["training", "evaluation", "either"] | None:
    """Return the mode of the model that computes the reference's log-probabilities; None without a reference.

    A frozen copy or another model is in evaluation mode; so is every model before the first step. A model whose adapter
    is switched off for the moment is in the policy's mode. Whether an adapter that does not start at zero is computed
    beforehand is known only when it is there: ``either``.
    """
    algorithm, tuning = ALGORITHMS.type_of(config.algorithm), TUNING.type_of(config.finetuning)
    if not algorithm.uses_reference:
        return None
    settings = config.chosen_sections().get(config.algorithm)
    beforehand = algorithm.scores_reference_once or getattr(settings, "precompute_ref_log_probs", None)
    if beforehand or not tuning.is_adapter or config.reference_model or config.reference_adapter:
        return "evaluation"
    if config.adapter and not config.new_adapter:
        return "evaluation"  # the adapter as it was: scored beforehand, or a copy
    return "training" if tuning.starts_as_base(config) else "either"
