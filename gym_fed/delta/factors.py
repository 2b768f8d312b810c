"""Split a PEFT adapter's change into LoRA factors, named like their weights, and other tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.config.hub.task import TrainingRecipe
    from gym_fed.delta.vocabulary import VocabularyChange

    Factors: TypeAlias = "tuple[Tensor, Tensor, float]"

_SHOWN = 3


@dataclass(frozen=True)
class LoraChange:
    """Everything that an adapter changed in its base.

    Attributes:
        factors: A ``[r, in]``, B ``[out, r]`` and scaling by weight, as input of ``lora_delta``.
        values: Differences of all other changed tensors by name, in float32: saved modules, trained tokens,
            biases, embeddings, and layers whose change is not one product (DoRA).
        added: Tokens and rows that the base does not have; None if they are refused.
    """

    factors: dict[str, Factors]
    values: dict[str, Tensor]
    added: VocabularyChange | None = None


def lora_change(
    model: Any, base: Mapping[str, Tensor], *, owned: bool = False, tokenizers: tuple[Any, Any] | None = None
) -> LoraChange:
    """Split an adapter's complete change into factors and differences.

    Args:
        model: A ``peft.PeftModel``.
        base: Tensors that the change is relative to; they may differ from those under the adapter.
        owned: True to merge the adapter into ``model`` itself instead of a copy.
        tokenizers: Tokenizers of the base and the adapter, to accept added tokens; None refuses them.

    Raises:
        GymError: ``BASE_MISMATCH`` for tensors that the base does not have, such as a separate head if the base
            shares the embeddings' weights; errors from ``gym_fed.base.modeling.adapters.merged``.
    """
    import torch

    from gym_fed.base.modeling.adapters import merged
    from gym_fed.delta.base import BaseSpec, checked_tensors, model_tensors
    from gym_fed.delta.vocabulary import split_vocabulary

    old = model_tensors(base)
    factors = factors_on(model, old)
    spec = BaseSpec("the base", "", {name: tuple(tensor.shape) for name, tensor in old.items()})
    tuned = merged(model if owned else copy.deepcopy(model))
    whole, added = (
        (model_tensors(tuned), None) if tokenizers is None else split_vocabulary(tuned, old, tokenizers)
    )
    new = checked_tensors(whole, spec, "tuned")
    values: dict[str, Tensor] = {}
    for name in new.keys() - factors.keys():
        difference = new[name].to("cpu", torch.float32) - old[name].to("cpu", torch.float32)
        if bool(difference.any()):
            values[name] = difference
    return LoraChange(factors, values, added)


def factors_on(model: Any, base: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return the factors of each weight whose change from ``base`` is one product; others may have changed too."""
    import torch

    return {
        name: product_factors
        for name, product_factors, frozen in _products(model)
        if name in base and torch.equal(frozen.to("cpu", torch.float32), base[name].to("cpu", torch.float32))
    }


def lora_factors(model: Any) -> dict[str, Factors]:
    """Return the factors of each adapted weight by name, for an adapter that changes nothing else.

    Args:
        model: A ``peft.PeftModel`` with one active LoRA adapter on linear layers.

    Raises:
        GymError: ``MODEL_INVALID`` naming the modules whose change is not ``scaling * B @ A``.
    """
    beyond = list(beyond_factors(model))
    if beyond:
        more = f" and {len(beyond) - _SHOWN} more" if len(beyond) > _SHOWN else ""
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"the adapter changes more than LoRA factors: {', '.join(beyond[:_SHOWN])}{more}",
            "encode it as differences of tensors, with codec bitdelta or dense",
        )
    factors_by_name = {name: factors for name, factors, _ in _products(model)}
    if not factors_by_name:
        remedy = "choose codec bitdelta or dense"
        raise GymError(ErrorCode.MODEL_INVALID, "the model has no LoRA layers", remedy)
    return factors_by_name


def require_matrix_targets(recipe: TrainingRecipe, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse layers whose change would not be factors of one of the base's matrices, which is all that rounds send.

    Args:
        recipe: A recipe that sends factors.
        shapes: Shapes of the base's tensors by name.

    Raises:
        GymError: ``CONFIG_INVALID`` naming an embedding, a layer that has no matrix of its own in the base, or an
            output head whose adapter the algorithm's loss would ignore.
    """
    from gym_fed.core.registries import ALGORITHMS
    from gym_fed.delta.policy import part_of

    targets = recipe.lora.target_modules
    ignores_head = ALGORITHMS.type_of(recipe.algorithm).multiplies_by_head
    if isinstance(targets, str):
        return
    for target in targets:
        suffix = f".{target}.weight"
        matches = {name: shape for name, shape in shapes.items() if f".{name}".endswith(suffix)}
        if not any(len(shape) == 2 for shape in matches.values()):
            reason = (
                "which has no separate matrix in this base: it is missing, fused, or tied to the embeddings"
            )
        elif any(part_of(name, shape) == "embeddings" for name, shape in matches.items()):
            reason = "an embedding, whose change is not the factors of a linear layer"
        elif ignores_head and any(part_of(name, shape) == "head" for name, shape in matches.items()):
            reason = f"the output head, whose adapter the loss of {recipe.algorithm} ignores"
        else:
            continue
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"recipe.lora.target_modules: contains {target!r}, {reason}",
            "name linear layers below the head, or train everything with finetuning: full",
        )


def is_plain_lora(model: Any) -> bool:
    """Return True if only LoRA factors were trained."""
    if not hasattr(model, "peft_config") or any(True for _ in beyond_factors(model)):
        return False
    return any(True for _ in _products(model))


def _products(model: Any) -> Iterator[tuple[str, Factors, Tensor]]:
    """Yield each weight whose change is one product: its name, its factors, and the weight without them."""
    for name, layer in model.get_base_model().named_modules():
        if _is_one_product(layer):
            active = layer.active_adapters[0]
            a, b = layer.lora_A[active].weight.detach(), layer.lora_B[active].weight.detach()
            if layer.fan_in_fan_out:  # GPT-2's weights are [in, out]
                a, b = b.T.contiguous(), a.T.contiguous()
            factors = (*_reduced(a, b), float(layer.scaling[active]))
            yield f"{name}.weight", factors, layer.get_base_layer().weight.detach()


def _reduced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors with the same product and a rank of at most the weight's smaller dimension.

    The product of 16-bit factors is computed and returned in float32, which does not round it to 16 bits.
    """
    import torch

    rank, (rows, columns) = a.shape[0], (b.shape[0], a.shape[1])
    if rank <= min(rows, columns):
        return a, b
    product = b.float() @ a.float()
    identity = torch.eye(min(rows, columns), device=product.device)
    return (product, identity) if rows <= columns else (identity, product)


def beyond_factors(model: Any) -> Iterator[str]:
    """Describe the weights that an adapter trains in addition to two factors per linear layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for config in model.peft_config.values():
        if (bias := getattr(config, "bias", "none")) != "none":
            yield f"bias: {bias}"
    inner: list[str] = []
    for name, module in model.get_base_model().named_modules():
        if any(name.startswith(outer) for outer in inner):
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not _is_one_product(module):
            inner.append(f"{name}.")
            yield name


def _is_one_product(layer: Any) -> bool:
    from peft.tuners.lora import Linear

    if not isinstance(layer, Linear):
        return False
    active = layer.active_adapters
    if len(active) != 1 or active[0] not in layer.lora_A or layer.merged:
        return False
    return not layer.use_dora.get(active[0]) and not layer.lora_bias.get(active[0])
