"""Train a float32 adapter on frozen 16-bit weights: half the base's memory, full-precision updates."""

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

    tried = "bfloat16 with every adapter, modules_to_save, 4-bit bases, sft, dpo, ppo and a reward model"

    def check(self, config: TrainingConfig) -> None:
        key = f"base_dtype: {config.base_dtype}"
        tuning = TUNING.type_of(config.finetuning)
        section = config.chosen_sections().get(config.finetuning)
        strategy = config.distributed_strategy
        method = config.finetuning
        biases = getattr(section, "bias", "none") != "none"
        shards = f" does not work with {strategy}, which shards weights of one dtype together"
        no_adapter = f" applies to the base of an adapter, but finetuning: {method} has no adapter"
        freezes_none = tuning.trains_all and not tuning.is_adapter
        refuse_first(
            (freezes_none, " applies to frozen weights, but full fine-tuning freezes none"),
            (not tuning.is_adapter, no_adapter),
            (biases, " would also apply to the base's biases, which are trained", f"set {method}.bias: none"),
            (config.splits_state, shards, "set dtype: bfloat16, or distributed.strategy: ddp"),
            prefix=key,
            remedy="set dtype instead",
        )

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        """Convert trained weights to float32, in which they are also saved."""
        import torch

        dtype = getattr(torch, config.loaded_dtype)
        converted = [
            weight for weight in model.parameters() if weight.requires_grad and weight.dtype is dtype
        ]
        for weight in converted:
            weight.data = weight.data.float()
        # Convert only around whole modules, since PEFT itself converts the inputs of its float32 factors.
        ids, body = set(map(id, converted)), set(model.base_model.modules())
        for module in model.modules():
            if ids & {id(weight) for weight in module.parameters(recurse=False)}:
                _convert_around(module, dtype if module in body else None)
        yield


def _convert_around(module: Any, dtype: Any) -> None:
    """Make a float32 module accept 16-bit inputs and return outputs in ``dtype``, or in float32 if it is None."""
    import torch

    def widen(_: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(v.float() if torch.is_tensor(v) and v.is_floating_point() else v for v in values)

    def narrow(_: Any, values: tuple[Any, ...], output: Any) -> Any:
        return output.to(dtype)

    module.register_forward_pre_hook(widen)
    if dtype is not None:
        module.register_forward_hook(narrow)
