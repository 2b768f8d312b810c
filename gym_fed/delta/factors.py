"""LoRA factors of a PEFT model, named like the weights they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from torch import Tensor


def lora_factors(model: Any) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Each adapted weight by name, as ``lora_delta`` takes it: A ``[r, in]``, B ``[out, r]``, scaling.

    Args:
        model: A ``peft.PeftModel`` with one active LoRA adapter on linear layers.

    Raises:
        GymError: ``MODEL_INVALID`` naming the layer whose change is not ``scaling * B @ A`` alone.
    """
    from peft.tuners.lora import Linear

    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    modules: Iterable[tuple[str, Any]] = model.get_base_model().named_modules()
    for name, layer in modules:
        if not hasattr(layer, "lora_A"):
            continue
        if not _is_one_product(layer, Linear):
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"layer {name!r}: its change is more than one product of LoRA factors",
                "encode the merged model instead, with codec bitdelta or dense",
            )
        active = layer.active_adapters
        a, b = layer.lora_A[active[0]].weight, layer.lora_B[active[0]].weight
        found[f"{name}.weight"] = (a.detach(), b.detach(), float(layer.scaling[active[0]]))
    if not found:
        raise GymError(
            ErrorCode.MODEL_INVALID, "the model has no LoRA layers", "choose codec bitdelta or dense"
        )
    return found


def _is_one_product(layer: Any, linear: Any) -> bool:
    active = layer.active_adapters
    matrix = isinstance(layer, linear)
    if not matrix or len(active) != 1 or layer.merged or layer.fan_in_fan_out:
        return False
    return not layer.use_dora.get(active[0]) and not layer.lora_bias.get(active[0])


def is_plain_lora(model: Any) -> bool:
    """Whether two factors a layer are all that was trained."""
    if not hasattr(model, "peft_config"):
        return False
    settings = model.peft_config[model.active_adapter]
    if _is_lora(settings) and any(
        min(a.shape[1], b.shape[0]) < a.shape[0] for a, b in _factors(model, model.active_adapter)
    ):
        return False  # more columns than the weight has: as factors it would be larger than as it is
    odd = (
        (settings.use_dora, settings.modules_to_save, settings.bias != "none")
        if _is_lora(settings)
        else (True,)
    )
    return not any(odd)


def _factors(model: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """A ``[r, in]`` and B ``[out, r]`` of every linear layer that the adapter is on."""
    for layer in model.modules():
        if name in getattr(layer, "lora_A", {}):
            yield layer.lora_A[name].weight, layer.lora_B[name].weight


def _is_lora(settings: Any) -> bool:
    return str(settings.peft_type.value) == "LORA"
