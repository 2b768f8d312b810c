"""Adam-mini: one second moment per block of weights (a head, a row of embeddings, an MLP) instead of per weight.

Zhang et al. 2024, "Adam-mini: Use Fewer Learning Rates To Gain More"; implemented by pytorch-optimizer.
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.optimizers.base import LibraryOptimizer, TrainedWeight, create_checked, refuse_loraplus


class AdamMini(LibraryOptimizer):
    """``pytorch_optimizer.AdamMini``, configured with the model's number of heads."""

    of_one_model = "groups the weights by the heads of one model"

    def __init__(self) -> None:
        super().__init__("pytorch_optimizer:AdamMini", package="pytorch_optimizer")

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return float((1 if weight.hidden else 2) * weight.numel * weight.itemsize)

    def check(self, config: TrainingConfig) -> None:
        refuse_loraplus(config)
        super().check(config)

    def known(self) -> list[str]:
        return ["eps"]

    def try_arguments(self, config: TrainingConfig) -> None:
        import torch

        self._create(torch.nn.Linear(4, 4), config, hidden=4, heads=1, key_heads=1)

    def make(self, model: Any, config: TrainingConfig) -> Any:
        text = model.config.get_text_config()
        hidden, heads = text.hidden_size, text.num_attention_heads
        key_heads = getattr(text, "num_key_value_heads", heads)
        optimizer = self._create(model, config, hidden=hidden, heads=heads, key_heads=key_heads)
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        for group in optimizer.param_groups:
            if "parameter_per_head" in group:  # the library assumes a head width of hidden / heads
                group["parameter_per_head"] = head_dim * hidden
        return optimizer

    def _create(self, model: Any, config: TrainingConfig, *, hidden: int, heads: int, key_heads: int) -> Any:
        def make() -> Any:
            return self.type()(
                model,
                lr=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                weight_decay=config.weight_decay,
                num_embeds=hidden,
                num_heads=heads,
                num_query_groups=key_heads,
                **config.optimizer_args,
            )

        return create_checked(config, make)
