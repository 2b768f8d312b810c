"""Mixed precision: the byte budget goes where it lowers the model's error most.

Sensitivity is measured: each tensor alone gets its smallest codec while all others stay tuned, and the divergence of
the model's predictions is what that costs. Larger codecs cost less in proportion to the squared error of the layer's
output, since a divergence grows with the square of a small change. The split itself is ``gym_quant.allocation``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from gym_quant import get_codec
from gym_quant.allocation import allocate
from gym_quant.calibration import output_error
from gym_quant.distill import Batch, divergence
from torch import Tensor

from gym_fed.delta.budget import file_bytes
from gym_fed.delta.manifest import TensorRecord
from gym_fed.delta.policy import Choice
from gym_fed.errors import ErrorCode, GymError
from gym_fed.quantization.quantizer import Plan, Work, about_tensor

_PROBE_SEQUENCES = 16

Importance = Callable[[Plan, Tensor | None], dict[str, Tensor]]


def assign_bits(
    work: Work,
    fixed: Mapping[str, Plan],
    options: Mapping[str, list[Plan]],
    max_bits_per_weight: float,
    importance: Importance,
) -> dict[str, Plan]:
    """Choose one of the options, smallest first, for each tensor.

    Raises:
        GymError: ``CONFIG_INVALID`` when not even the smallest options fit the budget.
    """
    whole = math.floor(work.spec.num_parameters * max_bits_per_weight / 8)
    for_all = {name: plan for name, plan in fixed.items() if bool(work.deltas[name].any())}
    tuned = work.tuned()
    table = {
        n: _costs(n, work, tuned, plans, importance) for n, plans in options.items() if work.deltas[n].any()
    }
    room, smallest = whole, _file_bytes(work, {**for_all, **{n: options[n][0] for n in table}})
    while True:
        choice = allocate(table, room - sum(_payload(work, n, p) for n, p in for_all.items()))
        if choice is None or room <= 0:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"max_bits_per_weight: {max_bits_per_weight} is {whole} bytes, and the smallest codecs take {smallest}",
                f"raise it above {8 * smallest / work.spec.num_parameters:.2f}, or encode embeddings and norms smaller",
            )
        chosen = {name: options[name][index] for name, index in choice.items()}
        over = _file_bytes(work, {**for_all, **chosen}) - whole
        if over <= 0:
            break
        room -= over
    return {
        name: dataclasses.replace(plan, why=f"budget: cost {table[name][choice[name]][1]:.3g} nats a token")
        for name, plan in chosen.items()
    }


def _costs(
    name: str, work: Work, tuned: dict[str, Tensor], plans: list[Plan], importance: Importance
) -> list[tuple[int, float]]:
    """Bytes and cost in nats a token of each option."""
    delta, moments = work.deltas[name], work.moments.get(name)
    decoded: list[Tensor] = []
    for plan in plans:
        codec = get_codec(plan.codec)
        with about_tensor(name):
            encoded = codec.encode(delta, **plan.params, **importance(plan, moments))
        decoded.append(codec.decode(encoded.payload, tuple(delta.shape), encoded.params))
    errors = [output_error(delta, one, moments) for one in decoded]
    unit = _probe(name, work, tuned, decoded[0]) / errors[0] if errors[0] else 0.0
    return [(_payload(work, name, p), unit * e) for p, e in zip(plans, errors, strict=True)]


def _probe(name: str, work: Work, tuned: dict[str, Tensor], decoded: Tensor) -> float:
    """Divergence from the tuned model when this tensor alone is encoded."""
    old = work.base[name]
    worse = {**tuned, name: (old.float() + decoded.to(old.device)).to(old.dtype)}
    chosen: list[Batch] = []
    for batch in work.batches:
        if sum(len(b.ids) for b in chosen) < _PROBE_SEQUENCES:
            chosen.append(batch)
    with torch.no_grad():
        return max(0.0, divergence(work.model, worse, tuned, chosen, "kl"))


def _payload(work: Work, name: str, plan: Plan) -> int:
    return get_codec(plan.codec).payload_bytes(tuple(work.deltas[name].shape), plan.params)


def _file_bytes(work: Work, plans: Mapping[str, Plan]) -> int:
    choices = (
        Choice(TensorRecord(n, tuple(work.deltas[n].shape), p.codec, p.params), _payload(work, n, p), p.why)
        for n, p in plans.items()
    )
    return file_bytes(list(choices), work.spec, {})
