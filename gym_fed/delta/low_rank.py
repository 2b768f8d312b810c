"""Encode LoRA factors for a file, as trained or quantised, with error feedback on the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from gym_quant import CodecError, Encoded, Payload
from gym_quant.codec import check_finite
from gym_quant.codecs.lora import Lora, against_sign_bits, factor_budget
from gym_quant.factor_encoding import GROUP
from gym_quant.factors import Components, components_of_matrix, components_of_product, plan_factors
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.manifest import TensorRecord
from gym_fed.delta.policy import CodecChoice

Factors: TypeAlias = "tuple[Tensor, Tensor, float]"
"""A ``[r, in]``, B ``[out, r]``, scaling: the change of a weight is ``scaling * B @ A``."""

_LORA = Lora()


@dataclass(frozen=True)
class Written:
    """Factors as written to the file."""

    choice: CodecChoice
    payload: Payload


def plain_factors(factors: Mapping[str, Factors], number_format: str) -> dict[str, Written]:
    """Encode factors as trained, in ``bfloat16`` or ``float32``."""
    written: dict[str, Written] = {}
    for name, (a, b, scaling) in factors.items():
        with _about(name):
            encoded = _LORA.encode_factors(a, b, scaling, factors=number_format)
        written[name] = _written(name, (b.shape[0], a.shape[1]), encoded, "factors as trained")
    return written


def quantise_factors(
    factors: Mapping[str, Factors],
    policy: CodecPolicy,
    spec: BaseSpec,
    residual: ErrorFeedback | None,
    on_tensor: Callable[[str], None] | None = None,
) -> dict[str, Written]:
    """Quantise factors by the policy; the loss of the products is recorded in ``residual``.

    With ``factors: auto`` bits go to the components of all tensors where they lose the least; a tensor of which no
    component is worth its bytes is left out, and stays in the residual.
    """
    components: dict[str, Components] = {}
    for name, (a, b, scaling) in factors.items():
        if on_tensor is not None:
            on_tensor(name)
        with _about(name):
            components[name] = _components(name, a, b, scaling, residual)
    group = policy.factor_group_size or GROUP
    plans = {name: (len(parts.values), str(policy.factors)) for name, parts in components.items()}
    if policy.factors == "auto":
        elements = sum(a.numel() + b.numel() for a, b, _ in factors.values())
        budget = factor_budget(policy.factor_bits, elements)
        plans = plan_factors(components, budget, group)
        if not plans and any(bool(parts.values.any()) for parts in components.values()):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"factor_bits allows {counted(budget, 'byte')}, too few for any component of {spec.model_name!r}",
                "raise factor_bits",
            )
    written: dict[str, Written] = {}
    for name, (a, b, scaling) in factors.items():
        if on_tensor is not None:
            on_tensor(name)
        shape = (b.shape[0], a.shape[1])
        if name in plans:
            rank, plan = plans[name]
            with _about(name):
                params = _LORA.normalise({"rank": rank, "factors": plan, "factor_group_size": group}, shape)
                encoded = _LORA.encode_components(components[name], shape, params)
            written[name] = _written(name, shape, encoded, f"factors: {policy.factors}")
        if residual is not None:
            exact = residual.compensated(name, _product(a, b, scaling))
            decoded = _LORA.decode(encoded.payload, shape, encoded.params) if name in plans else 0.0
            residual.record(name, exact - decoded)
    if residual is not None:
        for name in set(residual.names()) - set(factors):  # not trained in this round: its residual stays
            residual.record(name, residual.compensated(name, torch.zeros(spec.shapes[name])))
    return written


def _components(
    name: str, a: Tensor, b: Tensor, scaling: float, residual: ErrorFeedback | None
) -> Components:
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise CodecError(f"factors A {list(a.shape)} and B {list(b.shape)} do not match")
    a, b = (factor.detach().to("cpu", torch.float64) for factor in (a, b))
    check_finite(a, "factor A")
    check_finite(b, "factor B")
    rank = min(a.shape[0], a.shape[1], b.shape[0])
    if residual is None or residual.residual(name) is None:
        return components_of_product(scaling * b, a).first(rank)
    return components_of_matrix(residual.compensated(name, _product(a, b, scaling)), rank, b)


def _product(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    product = b.detach().to("cpu", torch.float64) @ a.detach().to("cpu", torch.float64)
    return product.mul_(scaling).to(torch.float32)


def _written(name: str, shape: tuple[int, int], encoded: Encoded, why: str) -> Written:
    size = _LORA.payload_bytes(shape, encoded.params)
    record = TensorRecord(name, shape, _LORA.name, encoded.params)
    return Written(CodecChoice(record, size, f"{why}; {against_sign_bits(shape, size)}"), encoded.payload)


@contextmanager
def _about(name: str) -> Iterator[None]:
    try:
        yield
    except CodecError as error:
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
