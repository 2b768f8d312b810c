"""Muon: orthogonalise the momentum of each hidden matrix before applying it, and update other weights by AdamW.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; implemented by pytorch-optimizer.
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.optimizers.base import (
    LibraryOptimizer,
    TrainedWeight,
    create_checked,
    hidden_groups,
    refuse_loraplus,
)


class Muon(LibraryOptimizer):
    """Muon at ``learning_rate`` for linear layers, and AdamW at ``adamw_lr`` for the output head and all other weights.

    ``adamw_lr`` defaults to ``learning_rate``; ``adam_beta1`` and ``adam_beta2`` are those of AdamW.
    """

    def __init__(self) -> None:
        package = "pytorch_optimizer"
        super().__init__(f"{package}:Muon", package=package, betas=False, learning_rate_scale=None)

    def check(self, config: TrainingConfig) -> None:
        refuse_loraplus(config)
        # The betas are used by AdamW, so they are not refused.
        super().check(config.model_copy(update={"adam_beta1": 0.9, "adam_beta2": 0.999}))

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return float((1 if weight.hidden else 2) * weight.numel * weight.itemsize)

    def known(self) -> list[str]:
        return [name for name in super().known() if name not in ("adamw_betas", "adamw_wd", "foreach")]

    def try_arguments(self, config: TrainingConfig) -> None:
        import torch

        self.construct([{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "use_muon": True}], config)

    def make(self, model: Any, config: TrainingConfig) -> Any:
        groups = [
            {"params": values, "use_muon": is_hidden, "weight_decay": decay}
            for (is_hidden, decay), values in hidden_groups(model, config).items()
        ]
        return self.construct(groups, config)

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        rate, betas = config.learning_rate, (config.adam_beta1, config.adam_beta2)
        arguments = {"lr": rate, "adamw_lr": rate, "adamw_betas": betas, **config.optimizer_args}
        for group in groups:
            group["lr"] = rate if group["use_muon"] else arguments["adamw_lr"]
            if not group["use_muon"]:
                group["betas"] = betas
        return create_checked(config, lambda: self.type()(groups, **arguments))
