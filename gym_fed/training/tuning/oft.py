"""Orthogonal fine-tuning: rotate the inputs of linear layers in blocks, which preserves angles between neurons.

Qiu et al. 2023, "Controlling Text-to-Image Diffusion by Orthogonal Finetuning"; PEFT's OFT v2 (input-centric).
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.tuning.base import Tuning


class Oft(Tuning):
    """OFT: ``W (R x)`` with R block-diagonal and orthogonal, parametrised by Cayley's transform."""

    tried = "learning, saving, bit-exact resume"

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import OFTConfig

        from gym_fed.training.model.peft_models import peft_arguments, wrap_for

        return wrap_for(model, OFTConfig(**peft_arguments(config)), config)
