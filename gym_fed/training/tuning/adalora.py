"""AdaLoRA: updates as P diag(E) Q, and the rank of each layer falls to what its triplets are worth.

Zhang et al. 2023, "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", algorithm 1.
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.tuning._checks import adalora_schedule
from gym_fed.training.tuning.base import Tuning

_UNKNOWN_YET = 10**9


class AdaLora(Tuning):
    """PEFT's AdaLoRA, whose allocator is called after every step and kept in checkpoints."""

    tried = "learns, saved, resumed to the bit"
    untried = "algorithms whose loss is not the model's own (refused)"

    def check(self, config: TrainingConfig) -> None:
        if not ALGORITHMS.type_of(config.algorithm).uses_model_loss:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"finetuning: adalora adds its penalty to the model's own loss, which {config.algorithm} does not use",
                "use finetuning: lora",
            )
        if config.max_steps is not None:
            assert config.adalora is not None  # filled in by the config
            adalora_schedule(config.adalora, config.max_steps)

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import AdaLoraConfig

        from gym_fed.training.tuning._peft import peft_arguments, wrap_for

        arguments = peft_arguments(config)
        for of_the_run in ("warmup_fraction", "final_fraction"):
            del arguments[of_the_run]
        delta_t = arguments.pop("delta_t")
        # The run's length is known when it begins.
        wanted = AdaLoraConfig(**arguments, deltaT=delta_t, total_step=_UNKNOWN_YET)
        return wrap_for(model, wanted, config)

    def callbacks(self, model: Any, config: TrainingConfig) -> list[Any]:
        from gym_fed.training.tuning._allocation import Allocation

        assert config.adalora is not None  # filled in by the config
        return [Allocation(model, config.adalora)]
