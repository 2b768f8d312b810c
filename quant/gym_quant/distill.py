"""Scale distillation: the scales of an encoded delta learn to make the base speak like the tuned model.

Liu et al. 2024, "BitDelta: Your Fine-Tune May Only Be Worth One Bit", eq. 4-5: bits and base are frozen, only scales
train, and the loss compares logits with the tuned model's. Here a scale trains as ``scale * exp(t)`` with ``t``
from 0, so that one learning rate fits scales of any size and none turns negative.

Memory: beside base and tuned weights, two float32 copies of every encoded matrix (its signs, and the weight with
its gradient) and the activations of one batch. The model itself is not changed and holds no second set of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gym_quant.codec import CodecError, Encoded, Shape, as_matrix
from gym_quant.registry import get_codec

Loss = Literal["mse", "kl"]
EncodedTensors = Mapping[str, tuple[str, Shape, Encoded]]
"""Name of a parameter to its codec's name, its shape, and its encoded delta."""

OnStep = Callable[[int, float], None]
"""Called after each step with its number, from 1, and its loss."""


@dataclass(frozen=True)
class Batch:
    """Calibration text: token ids ``[b, t]`` int64, and which of them are text, ``[b, t]`` bool (1 = text)."""

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Distilled:
    """What came of it.

    Attributes:
        encoded: Every tensor that was given; those that could train with their new scales.
        trained: Names of the tensors whose scales trained.
        num_scales: How many numbers trained.
        loss_before: Loss over all batches with the scales as encoded.
        loss_after: Loss over all batches with the scales that are returned, after rounding to their dtype; never
            more than ``loss_before``, whose scales are returned if training made it worse.
    """

    encoded: dict[str, Encoded]
    trained: tuple[str, ...]
    num_scales: int
    loss_before: float
    loss_after: float


def distill_scales(
    model: nn.Module,
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    encoded: EncodedTensors,
    batches: Sequence[Batch],
    *,
    steps: int = 200,
    lr: float = 3e-2,
    loss: Loss = "kl",
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Distilled:
    """Train the scales of ``encoded``. AdamW, cosine to zero; deterministic for a seed on one machine.

    Args:
        model: A causal LM of the base's architecture, called as ``model(input_ids=..., attention_mask=...,
            use_cache=False).logits``; its own weights do not matter and do not change. Tied weights are followed.
        base: Its frozen parameters by name.
        tuned: The teacher's parameters by name.
        encoded: The delta; parameters that it leaves out stay the base's.
        batches: At least one; drawn in an order that the seed decides.
        steps: One batch a step.
        lr: Peak learning rate of the logarithm of a scale.
        loss: ``mse`` of the logits, as in the paper, or ``kl``: the mean divergence from the teacher in nats a token.
        seed: Of the batches' order.
        on_step: Hears of every step.

    Raises:
        CodecError: When the loss is not finite, there is no batch, or a name is not in ``base``.
    """
    if not batches:
        raise CodecError("distillation needs at least one batch of calibration text")
    missing = sorted(set(encoded) - set(base))
    if missing:
        raise CodecError(f"the delta has a tensor {missing[0]!r} that the base does not have")
    student = _Student(model, base, encoded)
    compare = _LOSSES[loss]

    def divergence(batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = _logits(model, tuned, batch)
        return compare(_logits(model, student.weights(), batch), wanted, batch.mask)

    def over_all() -> float:
        with torch.no_grad():
            tokens = [int(batch.mask.sum()) for batch in batches]
            total = math.fsum(float(divergence(b)) * n for b, n in zip(batches, tokens, strict=True))
            return total / max(1, sum(tokens))

    was_training = model.training
    model.eval()
    try:
        before = _finite(over_all(), "as encoded")
        if not student.logs or steps == 0:
            return Distilled({n: e for n, (_, _, e) in encoded.items()}, (), 0, before, before)
        _train(student, divergence, batches, steps, lr, seed, on_step)
        student.round_to_storage()
        after = _finite(over_all(), "after distillation")
    finally:
        model.train(was_training)
    if after >= before:
        return Distilled(
            {n: e for n, (_, _, e) in encoded.items()}, student.names, student.size, before, before
        )
    return Distilled(student.result(), student.names, student.size, before, after)


def _train(
    student: _Student,
    divergence: Callable[[Batch], Tensor],
    batches: Sequence[Batch],
    steps: int,
    lr: float,
    seed: int,
    on_step: OnStep | None,
) -> None:
    logs = list(student.logs.values())
    optimizer = torch.optim.AdamW(logs, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(1, steps + 1):
        if not order:
            order = torch.randperm(len(batches), generator=generator).tolist()
        value = divergence(batches[order.pop()])
        gradients = torch.autograd.grad(value, logs)
        for log, gradient in zip(logs, gradients, strict=True):
            log.grad = gradient
        optimizer.step()
        schedule.step()
        found = _finite(float(value.detach()), f"at step {step}")
        if on_step is not None:
            on_step(step, found)


class _Student:
    """Base plus delta, with scales that train."""

    def __init__(self, model: nn.Module, base: Mapping[str, Tensor], encoded: EncodedTensors) -> None:
        self._base = base
        self._encoded = encoded
        self._units: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        self.logs: dict[str, Tensor] = {}
        for name, (codec, shape, one) in encoded.items():
            device = base[name].device
            unit = unit_delta(codec, shape, one)
            if unit is None:
                delta = get_codec(codec).decode(one.payload, shape, one.params).to(device)
                self._fixed[name] = base[name].to(torch.float32) + delta
                continue
            scales = one.payload["scales"].to(device, torch.float32)
            self._units[name] = unit.to(device)
            self._scales[name] = scales
            self.logs[name] = torch.zeros_like(scales, requires_grad=True)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.logs)

    @property
    def size(self) -> int:
        return sum(log.numel() for log in self.logs.values())

    def weights(self) -> dict[str, Tensor]:
        """All parameters in the base's dtype; gradients flow to ``logs``."""
        made = {name: tensor for name, tensor in self._base.items() if name not in self._encoded}
        for name, tensor in self._fixed.items():
            made[name] = tensor.to(self._base[name].dtype)
        for name, log in self.logs.items():
            scales = self._scales[name] * log.exp()
            old = self._base[name]
            delta = expand_scales(scales, self._encoded[name]) * self._units[name]
            made[name] = (old.to(torch.float32) + delta.reshape(old.shape)).to(old.dtype)
        return made

    def round_to_storage(self) -> None:
        """Continue with the scales as they will be stored."""
        for name, log in self.logs.items():
            stored = self._stored(name).to(self._scales[name])
            self._scales[name] = stored
            log.data.zero_()

    def result(self) -> dict[str, Encoded]:
        """What was given, with the new scales; each is looked at by its codec."""
        made = {name: one for name, (_, _, one) in self._encoded.items()}
        for name in self.logs:
            codec, shape, one = self._encoded[name]
            made[name] = Encoded(one.params, {**one.payload, "scales": self._stored(name)})
            get_codec(codec).check(made[name].payload, shape, made[name].params)
        return made

    def _stored(self, name: str) -> Tensor:
        dtype = self._encoded[name][2].payload["scales"].dtype
        return (self._scales[name] * self.logs[name].detach().exp()).to("cpu", dtype)


def unit_delta(codec: str, shape: Shape, encoded: Encoded) -> Tensor | None:
    """The delta ``[rows, cols]`` float32 that ``encoded`` would be if all its scales were one.

    None where the delta is not its scales times that: codecs without scales, or with offsets beside them.
    """
    scales = encoded.payload.get("scales")
    if scales is None:
        return None
    member = get_codec(codec)
    ones = {**encoded.payload, "scales": torch.ones_like(scales)}
    rows, cols = as_matrix(shape)
    unit = member.decode(ones, shape, encoded.params).reshape(rows, cols)
    real = member.decode(encoded.payload, shape, encoded.params).reshape(rows, cols)
    wide = expand_scales(scales.to(torch.float32), (codec, shape, encoded))
    return unit if torch.allclose(real, wide * unit, rtol=1e-5, atol=0.0) else None


def expand_scales(scales: Tensor, tensor: tuple[str, Shape, Encoded]) -> Tensor:
    """Scales ``[1]`` or ``[rows, groups]`` so that they can be multiplied with ``[rows, cols]``."""
    _, shape, encoded = tensor
    rows, cols = as_matrix(shape)
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    grouped = scales.reshape(rows, -1)
    if grouped.shape[1] == 1:
        return grouped
    return grouped.repeat_interleave(int(encoded.params["group_size"]), dim=1)[:, :cols]


def _logits(model: nn.Module, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
    arguments = {"input_ids": batch.ids, "attention_mask": batch.mask.long(), "use_cache": False}
    logits: Tensor = functional_call(model, dict(weights), (), arguments).logits
    return logits.float()


def _mse(found: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
    return ((found - wanted)[mask]).square().mean()


def _kl(found: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
    log_found, log_wanted = found[mask].log_softmax(-1), wanted[mask].log_softmax(-1)
    return (log_wanted.exp() * (log_wanted - log_found)).sum(-1).mean()


_LOSSES: dict[Loss, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"mse": _mse, "kl": _kl}


def _finite(value: float, when: str) -> float:
    if not math.isfinite(value):
        raise CodecError(f"the distillation loss is {value} {when}: lower the learning rate")
    return value
