"""Frozen 16-bit weights with a float32 adapter: half the base's memory, full-precision updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import TUNING
from gym_fed.training.features.base import Feature


class BaseDtype(Feature):
    """Loads the model in ``base_dtype``, and keeps all trained weights in float32."""

    tried = "bfloat16 under every adapter, with modules_to_save, bases in 4 bits, sft, dpo, ppo and a reward model"

    def check(self, config: TrainingConfig) -> None:
        key = f"base_dtype: {config.base_dtype}"
        tuning = TUNING.type_of(config.finetuning)
        section = config.chosen_sections().get(config.finetuning)
        strategy = config.distributed_strategy
        method = config.finetuning
        biases = getattr(section, "bias", "none") != "none"
        shards = f" does not work with {strategy}, which shards weights of one dtype together"
        refuse_first(
            (
                tuning.trains_all and not tuning.is_adapter,
                " applies to frozen weights, but full fine-tuning freezes none",
            ),
            (
                not tuning.is_adapter,
                f" applies to the base of an adapter, but finetuning: {method} has no adapter",
            ),
            (biases, " would hold the base's biases, which are trained", f"set {method}.bias: none"),
            (config.splits_state, shards, "set dtype: bfloat16, or distributed.strategy: ddp"),
            prefix=key,
            remedy="set dtype instead",
        )

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        """Convert trained weights to float32; they are saved as such."""
        import torch

        dtype = getattr(torch, config.loaded_dtype)
        low = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype is dtype]
        for weight in low:
            weight.data = weight.data.float()
        # Only whole modules: PEFT converts around its own float32 factors.
        widened, body = set(map(id, low)), set(model.base_model.modules())
        for module in model.modules():
            if widened & {id(weight) for weight in module.parameters(recurse=False)}:
                _convert_around(module, dtype if module in body else None)
        yield


def _convert_around(module: Any, dtype: Any) -> None:
    """Make a float32 module accept 16-bit values, and return ``dtype``; None for float32."""
    import torch

    def widen(_: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
        floats = (torch.is_tensor(value) and value.is_floating_point() for value in values)
        return tuple(
            value.float() if is_float else value for value, is_float in zip(values, floats, strict=True)
        )

    def narrow(_: Any, values: tuple[Any, ...], output: Any) -> Any:
        return output.to(dtype)

    module.register_forward_pre_hook(widen)
    if dtype is not None:
        module.register_forward_hook(narrow)
