"""The base class of optimisers: a name that transformers knows, or a function of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first


@dataclass(frozen=True)
class TrainedWeight:
    """A trained tensor, with the facts that decide the size of its state.

    Attributes:
        shape: Its shape.
        itemsize: Bytes of one of its values.
        hidden: Whether it is the matrix of a linear layer that is not an output head.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    hidden: bool = False

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


def factored_bytes(weight: TrainedWeight) -> float:
    """Return the bytes of float32 second moments as a row and a column per matrix (Shazeer and Stern 2018)."""
    shape = weight.shape
    if len(shape) < 2:
        return 4.0 * weight.numel
    return 4.0 * (weight.numel // shape[-1] + weight.numel // shape[-2])


class OptimizerChoice:
    """One value of ``optimizer``. Stateless. Either ``arguments`` or ``make`` is overridden."""

    shards: bool = False
    """Whether it takes weights that are split over processes."""

    per_example: bool = False
    """Whether noised gradients are all that it needs, so that ``privacy`` may use it."""

    learning_rate_scale: float | None = 1.0
    """Its usual learning rate, divided by AdamW's; None where no such ratio is known and the user gives the rate."""

    replaces_schedule: bool = False
    """Whether it takes the place of a schedule: it warms up by itself under a constant one, or refuses to."""

    whole_weights: bool = False
    """True if it works on whole weight matrices or layers, so that it cannot train an adapter."""

    makes_lora_fa: bool = False
    """Whether it becomes LoRA-FA's own optimiser, where ``lora.lora_fa`` is set."""

    state_values: float = 2.0
    """Values of state that it keeps for every trained value, each as wide as that; read by ``state_bytes``."""

    of_one_model: str = ""
    """Why it cannot train a second model (a critic) too, as a verb phrase for messages; empty if it can."""

    of_one_process: str = ""
    """Why several processes cannot use it, as a verb phrase for messages; empty if they can."""

    def check(self, config: TrainingConfig) -> None:
        """Refuse what this optimiser, machine or installation cannot honour, before anything is loaded.

        One that reads ``optimizer_args``, the betas or LoRA+'s ratio overrides this: here they are refused, so that
        none is given for nothing.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY`` naming the key and the remedy.
        """
        check_known(config, [])
        refuse_betas(config)
        refuse_loraplus(config)

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        """Return keyword arguments for ``transformers.TrainingArguments`` (``optim``, ``optim_args``, ...)."""
        return {}

    def make(self, model: Any, config: TrainingConfig) -> Any | None:
        """Create the ``torch.optim.Optimizer`` of the model's trainable weights; None if transformers creates it."""
        return None

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        """Return the bytes of state for one trained tensor after the first step."""
        return self.state_values * weight.numel * weight.itemsize

    def callbacks(self, config: TrainingConfig) -> list[Any]:
        """Return ``transformers.TrainerCallback`` objects that the optimiser needs."""
        return []


def check_known(config: TrainingConfig, known: list[str]) -> None:
    """Refuse names in ``optimizer_args`` that are not ``known``."""
    remedy = f"it takes {', '.join(sorted(known)) or 'none'}"
    refuse_first(
        *(
            (name not in known, f"optimizer_args: {config.optimizer} has no argument {name!r}", remedy)
            for name in config.optimizer_args
        )
    )


def refuse_betas(config: TrainingConfig) -> None:
    """Refuse ``adam_beta1`` and ``adam_beta2`` where nothing would read them."""
    for key in ("adam_beta1", "adam_beta2"):
        is_set = getattr(config, key) != TrainingConfig.model_fields[key].default
        refuse_first((is_set, f"{key}: optimizer {config.optimizer} has no betas", "remove it"))


def refuse_loraplus(config: TrainingConfig) -> None:
    """Refuse LoRA+ for an optimiser that groups the weights in its own way."""
    refuse_first(
        (
            config.lora is not None and config.lora.loraplus_lr_ratio is not None,
            f"lora.loraplus_lr_ratio: optimizer {config.optimizer} groups the weights in its own way",
            "use optimizer: adamw",
        )
    )
