"""AdaLoRA: updates have the form P diag(E) Q, and each layer's rank is reduced to its important triplets.

Zhang et al. 2023, "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", algorithm 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.train.tuning import AdaLoraSettings
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.training.tuning.base import Tuning

_UNKNOWN_STEPS = 10**9


class AdaLora(Tuning):
    """PEFT's AdaLoRA, whose allocator is called after every step and stored in checkpoints."""

    tried = "learning, saving, bit-exact resume"
    untried = "algorithms whose loss is not the model's own (refused)"

    def check(self, config: TrainingConfig) -> None:
        is_missing = not ALGORITHMS.type_of(config.algorithm).uses_model_loss
        reason = f"adalora adds its penalty to the model's own loss, which {config.algorithm} does not use"
        refuse_first((is_missing, f"finetuning: {reason}", "use finetuning: lora"))
        if config.max_steps is not None:
            assert config.adalora is not None  # set by the config
            adalora_schedule(config.adalora, config.max_steps)

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import AdaLoraConfig

        from gym_fed.training.model.peft_models import peft_arguments, wrap_for

        arguments = peft_arguments(config)
        del arguments["warmup_fraction"], arguments["final_fraction"]
        delta_t = arguments.pop("delta_t")
        # A placeholder, which is replaced when the run starts and its length is known.
        peft_config = AdaLoraConfig(**arguments, deltaT=delta_t, total_step=_UNKNOWN_STEPS)
        return wrap_for(model, peft_config, config)

    def callbacks(self, model: Any, config: TrainingConfig) -> list[Any]:
        from gym_fed.training.tuning._allocation import Allocation

        assert config.adalora is not None  # set by the config
        return [Allocation(model, partial(adalora_schedule, config.adalora))]


def adalora_schedule(settings: AdaLoraSettings, steps: int) -> tuple[int, int]:
    """Return PEFT's ``tinit`` and ``tfinal`` for a run of ``steps`` optimiser steps.

    The ranks become fixed at step ``steps - tfinal``, by the importance that was measured in the previous steps.

    Raises:
        GymError: ``CONFIG_INVALID`` if no steps are left to measure the importance or to reduce the ranks.
    """
    first, final = int(settings.warmup_fraction * steps), int(settings.final_fraction * steps)
    reason = f"adalora: a run of {counted(steps, 'optimiser step')} leaves none for reducing ranks"
    remedy = "train longer, or lower adalora.warmup_fraction and final_fraction"
    is_too_short = first + final >= steps or steps - final < 2
    refuse_first((is_too_short, reason, remedy if steps > 1 else "train for two steps or more"))
    return first, final
