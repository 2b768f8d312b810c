"""Train with LongLoRA's shifted sparse attention; the trained model uses full attention."""

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
    """Registers ``gym_fed.base.modeling.shift_attention`` with transformers' attention interface."""

    tried = "yes"

    def check(self, config: TrainingConfig) -> None:
        name = config.algorithm
        full = f"the reference of {name} uses full attention, so the policy would differ from it at the start"
        other = ", or use finetuning: lora with its default start and no precompute_ref_log_probs"
        once = ALGORITHMS.type_of(name).scores_reference_once
        differs = reference_mode(config) in ("evaluation", "either")
        refuse_first(
            (writes_answers(config), f"{name} generates its answers with full attention"),
            (differs, full, f"remove the key{'' if once else other}"),
            prefix="shift_attention: ",
            remedy="remove the key",
        )

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        from gym_fed.base.modeling.shift_attention import register_shift_attention

        assert config.shift_attention is not None  # the feature is on
        name = register_shift_attention(config.shift_attention.group_size_ratio)
        with attention_of(model, name):
            yield
