"""AdamW, Loshchilov and Hutter 2019; implemented by torch, fused if the device supports it."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.optimizers.base import OptimizerChoice, check_known, create_checked, parameter_groups


class AdamW(OptimizerChoice):
    """transformers' default AdamW; with LoRA+ or LoRA-FA, the one that PEFT builds."""

    shards = True
    per_example = True
    makes_lora_fa = True

    def check(self, config: TrainingConfig) -> None:
        import torch

        check_known(config, [] if config.lora is not None and config.lora.lora_fa else ["eps"])
        dummy = [torch.nn.Parameter(torch.zeros(1))]
        create_checked(config, lambda: torch.optim.AdamW(dummy, **config.optimizer_args))

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        return {"adam_epsilon": config.optimizer_args["eps"]} if config.optimizer_args else {}

    def make(self, model: Any, config: TrainingConfig) -> Any | None:
        import torch

        if config.lora is None:
            return None
        if config.lora.lora_fa:
            return _lora_fa(model, config)
        if config.lora.loraplus_lr_ratio is None:
            return None
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(
            parameter_groups(model, config), lr=config.learning_rate, betas=betas, **config.optimizer_args
        )


def _lora_fa(model: Any, config: TrainingConfig) -> Any:
    """Create PEFT's LoRA-FA optimiser (Zhang et al. 2023), with the config's betas instead of its fixed ones."""
    from peft.optimizers import create_lorafa_optimizer

    assert config.lora is not None
    optimizer = create_lorafa_optimizer(
        model,
        r=config.lora.r,
        lora_alpha=config.lora.lora_alpha,  # type: ignore[arg-type]  # it is only divided
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    for group in optimizer.param_groups:
        group["betas"] = (config.adam_beta1, config.adam_beta2)
    return optimizer
