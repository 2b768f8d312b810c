"""Keys that an optimiser would not read, and refuses."""

from __future__ import annotations

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError


def check_known(config: TrainingConfig, known: list[str]) -> None:
    """Refuse names in ``optimizer_args`` that are not ``known``.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    for name in config.optimizer_args:
        if name not in known:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"optimizer_args: {config.optimizer} has no argument {name!r}",
                f"it takes {', '.join(sorted(known)) or 'none'}",
            )


def refuse_betas(config: TrainingConfig) -> None:
    """Refuse ``adam_beta1`` and ``adam_beta2`` where nothing would read them.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    for key in ("adam_beta1", "adam_beta2"):
        if getattr(config, key) != TrainingConfig.model_fields[key].default:
            raise GymError(
                ErrorCode.CONFIG_INVALID, f"{key}: optimizer {config.optimizer} has no betas", "remove it"
            )


def refuse_loraplus(config: TrainingConfig) -> None:
    """Refuse LoRA+ for an optimiser that groups the weights in its own way.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    if config.lora is not None and config.lora.loraplus_lr_ratio is not None:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"lora.loraplus_lr_ratio: optimizer {config.optimizer} groups the weights in its own way",
            "use optimizer: adamw",
        )
