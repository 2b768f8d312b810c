"""What a run computes beside its training steps: features that act while training alone must be the same in it."""

from __future__ import annotations

from typing import Literal

from gym_fed.config.training import TrainingConfig

_ROLLOUTS = ("ppo", "grpo", "gspo", "rloo")
_AGAINST_REFERENCE = ("dpo", "kto", "tdpo")
_START_AT_ZERO = ("default", "gaussian", "orthogonal")


def writes_answers(config: TrainingConfig) -> bool:
    """Whether the model that is trained writes the answers that it learns from."""
    return config.algorithm in _ROLLOUTS or (
        config.distillation is not None and config.distillation.lmbda > 0
    )


def reference_mode(config: TrainingConfig) -> Literal["training", "evaluation", "either"] | None:
    """How the model at the start is asked for log-probabilities that the policy's are held against; None without one.

    A frozen copy, and whatever is asked before the first step, is in evaluation mode; a model whose adapter is switched
    off for the moment is in that of the policy. Whether an adapter that does not start at zero is asked beforehand is
    known only when it is there: ``either``.
    """
    from gym_fed.training.tuning.registry import get_tuning

    if config.algorithm == "npo":
        return "evaluation"
    if config.algorithm not in _AGAINST_REFERENCE:
        return None
    beforehand = getattr(getattr(config, config.algorithm), "precompute_ref_log_probs", None)
    if beforehand or not get_tuning(config.finetuning).is_adapter:
        return "evaluation"
    start = "default" if config.lora is None else config.lora.init_lora_weights
    return "training" if start in _START_AT_ZERO else "either"
