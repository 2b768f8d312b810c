"""LongLoRA's shifted sparse attention during training; the trained model uses full attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.features.attention import attention_of
from gym_fed.training.features.base import Feature, reference_mode, writes_answers


class ShiftAttention(Feature):
    """Registers ``gym_fed.base.modeling.shift_attention`` at transformers' attention interface."""

    tried = "yes"

    def check(self, config: TrainingConfig) -> None:
        refuse_first(
            (
                writes_answers(config),
                f"shift_attention: {config.algorithm} generates its own answers, and generation attends to everything",
                "remove the key",
            ),
            (
                reference_mode(config) in ("evaluation", "either"),
                f"shift_attention: the reference of {config.algorithm} attends to everything, so the policy would not "
                "begin at it",
                "remove the key"
                if ALGORITHMS.type_of(config.algorithm).scores_reference_once
                else "remove the key, or use finetuning: lora with its default start and no precompute_ref_log_probs",
            ),
        )

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        from gym_fed.base.modeling.shift_attention import register_shift_attention

        assert config.shift_attention is not None  # the feature is on
        name = register_shift_attention(config.shift_attention.group_size_ratio)
        with attention_of(model, name):
            yield
