"""How many bytes an update will have, before anything is trained."""

from __future__ import annotations

from typing import Any

from gym_client.agent.global_model import GlobalModel
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import LoraRecipe, TrainingRecipe

_HEAD = "lm_head"


def update_bytes(model: GlobalModel, recipe: TrainingRecipe, codec: CodecPolicy) -> int:
    """Bytes of the ``.gymdelta`` file that a round of this recipe makes, at most, before anything is trained.

    Exact but for what depends on the values: ``group_size: auto`` (the larger choice is reported), budgets (the
    budget is reported), and ``factors: auto``, whose mixture of grids may take a few header bytes more
    or less.
    """
    from gym_quant.codecs.lora import factor_budget
    from gym_quant.registry import get_codec

    from gym_fed.delta.budget import estimated_bytes, file_bytes
    from gym_fed.delta.manifest import TensorRecord
    from gym_fed.delta.policy import CodecChoice

    if not recipe.sends_factors:
        return estimated_bytes(model.base.shapes, codec, model.base)
    lora = get_codec("lora")
    choices = []
    for name, shape in _adapted(model.model, recipe.lora):
        wanted = _factor_params(recipe.lora, codec)
        params = lora.normalise({**wanted, "rank": min(recipe.lora.r, *shape)}, shape)
        payload_bytes = lora.payload_bytes(shape, params)
        if codec.factors == "auto":
            payload_bytes = factor_budget(codec.factor_bits, recipe.lora.r * sum(shape))
        choices.append(CodecChoice(TensorRecord(name, shape, lora.name, params), payload_bytes, "estimate"))
    return file_bytes(choices, model.base, {})


def _factor_params(recipe: LoraRecipe, codec: CodecPolicy) -> dict[str, Any]:
    """The codec's parameters but for the rank; with ``factors: auto`` a plan stands for the one yet to be found."""
    if not codec.quantises_factors:
        return {"scaling": recipe.lora_alpha / recipe.r, "factors": codec.factors}
    return {
        "factors": "int4" if codec.factors == "auto" else codec.factors,
        "factor_group_size": codec.factor_group_size,
    }


def _adapted(model: Any, recipe: LoraRecipe) -> list[tuple[str, tuple[int, int]]]:
    """Names and shapes of the linear weights that the recipe adapts, by PEFT's rules."""
    import torch

    found: list[tuple[str, tuple[int, int]]] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        last = name.rpartition(".")[2]
        wanted = last != _HEAD if recipe.target_modules == "all-linear" else last in recipe.target_modules
        if wanted:
            found.append((f"{name}.weight", (module.out_features, module.in_features)))
    return found
