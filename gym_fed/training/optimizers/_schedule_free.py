"""Schedule-free optimisers, which average the iterates instead of lowering the learning rate.

Defazio et al. 2024, "The Road Less Scheduled". Gradients are taken at y and the result is x: the weights must be
exchanged before the model is used. transformers does so for evaluation, the callback here at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.training.optimizers.base import LibraryOptimizer


@dataclass(frozen=True)
class ScheduleFree(LibraryOptimizer):
    """An optimiser of the package ``schedulefree``.

    Attributes:
        warms_up: True if it takes ``warmup_steps``.
    """

    replaces_schedule = True
    package: str | None = "schedulefree"
    warms_up: bool = True

    def check(self, config: TrainingConfig) -> None:
        key = "warmup_ratio" if config.warmup_ratio else "warmup_steps"
        schedule = (
            f"lr_scheduler_type: {config.lr_scheduler_type} with {config.optimizer}, which replaces schedules"
        )
        unused = config.warmup_ratio or (config.warmup_steps and not self.warms_up)
        remedy = "give warmup_steps" if self.warms_up else "remove it: this optimizer warms up by itself"
        refuse_first(
            (
                config.lr_scheduler_type != "constant",
                schedule,
                "set it to constant; warmup_steps still counts",
            ),
            (unused, f"{key}: optimizer {config.optimizer} cannot use it", remedy),
        )
        super().check(config)

    def known(self) -> list[str]:
        return [name for name in super().known() if name not in ("warmup_steps", "foreach")]

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        if not self.warms_up:
            return super().construct(groups, config)
        warm = {**config.optimizer_args, "warmup_steps": config.warmup_steps}
        return super().construct(groups, config.model_copy(update={"optimizer_args": warm}))

    def callbacks(self, config: TrainingConfig) -> list[Any]:
        from transformers import TrainerCallback

        class AverageAtEnd(TrainerCallback):
            """Replaces the weights by the average after the last step, before its checkpoint."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step >= state.max_steps:
                    kwargs["optimizer"].eval()

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                kwargs["optimizer"].eval()  # if the run ended early; a second call does nothing

        return [AverageAtEnd()]
