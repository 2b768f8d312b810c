"""Muon: the momentum of each hidden matrix is orthogonalised before it is applied; AdamW updates the other weights.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; pytorch-optimizer's.
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.optimizers.base import (
    LibraryOptimizer,
    TrainedWeight,
    create_checked,
    hidden_matrices,
    refuse_loraplus,
    split,
)


class Muon(LibraryOptimizer):
    """Linear layers except the output head by Muon at ``learning_rate``; embeddings, norms, biases and head by AdamW at
    ``adamw_lr`` (by default ``learning_rate``) with ``adam_beta1`` and ``adam_beta2``."""

    def __init__(self) -> None:
        super().__init__(
            "pytorch_optimizer:Muon", package="pytorch_optimizer", betas=False, learning_rate_scale=None
        )

    def check(self, config: TrainingConfig) -> None:
        refuse_loraplus(config)
        # The betas are for AdamW here, so they are not refused.
        super().check(config.model_copy(update={"adam_beta1": 0.9, "adam_beta2": 0.999}))

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return float((1 if weight.hidden else 2) * weight.numel * weight.itemsize)

    def known(self) -> list[str]:
        return [name for name in super().known() if name not in ("adamw_betas", "adamw_wd", "foreach")]

    def try_arguments(self, config: TrainingConfig) -> None:
        import torch

        self.construct([{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "use_muon": True}], config)

    def make(self, model: Any, config: TrainingConfig) -> Any:
        hidden = hidden_matrices(model)
        groups: dict[tuple[bool, float], list[Any]] = {}
        for _, value, decay in split(model, config):
            groups.setdefault((id(value) in hidden, decay), []).append(value)
        return self.construct(
            [
                {"params": values, "use_muon": by_muon, "weight_decay": decay}
                for (by_muon, decay), values in groups.items()
            ],
            config,
        )

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        taken = {"adamw_lr": config.learning_rate, **config.optimizer_args}
        rates = {True: config.learning_rate, False: taken["adamw_lr"]}
        betas = (config.adam_beta1, config.adam_beta2)
        for group in groups:
            group["lr"] = rates[group["use_muon"]]
            if not group["use_muon"]:
                group["betas"] = betas
        return create_checked(
            config, lambda: self.type()(groups, lr=config.learning_rate, adamw_betas=betas, **taken)
        )
