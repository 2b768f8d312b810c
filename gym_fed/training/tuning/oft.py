"""Orthogonal fine-tuning: inputs of linear layers are rotated in blocks, so that angles between neurons stay.

Qiu et al. 2023, "Controlling Text-to-Image Diffusion by Orthogonal Finetuning"; PEFT's OFT v2 (input-centric).
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.training.tuning.base import Tuning


class Oft(Tuning):
    """``W (R x)`` with R block-diagonal and orthogonal, by Cayley's transform."""

    tried = "learns, saved, resumed to the bit"

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import OFTConfig

        from gym_fed.training.tuning._peft import task_type, wrap_for

        settings = config.oft
        assert settings is not None  # filled in by the config
        wanted = OFTConfig(
            task_type=task_type(config),
            r=settings.r,
            oft_block_size=settings.oft_block_size,
            module_dropout=settings.module_dropout,
            coft=settings.coft,
            eps=settings.eps,
            block_share=settings.block_share,
            use_cayley_neumann=settings.use_cayley_neumann,
            num_cayley_neumann_terms=settings.num_cayley_neumann_terms,
            target_modules=settings.target_modules,
            modules_to_save=settings.modules_to_save or None,
        )
        return wrap_for(model, wanted, config)
