"""Scale distillation: train the scales of an encoded delta to match the tuned model's predictions.

Liu et al. 2024, "BitDelta: Your Fine-Tune May Only Be Worth One Bit", eq. 4-5: the bits and the base are frozen,
only the scales are trained, and the loss compares logits with the tuned model's. Here a scale is trained as
``scale * exp(t)``, with ``t`` starting at 0, so that one learning rate fits scales of any size and none turns
negative.

Beyond the paper, bits may train too (``bit_lr``) if the codec allows it (``Codec.trains_bits``): a weight's sign is
that of a latent number, which starts at ``delta / scale`` and is trained by a straight-through gradient (Courbariaux
et al. 2016, "Binarized Neural Networks", eq. 4). The file's format is the same, but its bits are no longer the delta's
signs.

Memory: the base and tuned weights, about three float32 copies of every encoded matrix (signs, weight and gradient;
three more if bits train), and one batch's activations. The model itself does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from gym_quant.codec import CodecError, Encoded, Shape, as_matrix
from gym_quant.packing import pack_signs, unpack_signs
from gym_quant.registry import get_codec

Loss = Literal["mse", "kl"]
EncodedTensors = Mapping[str, tuple[str, Shape, Encoded]]
"""A mapping from a parameter's name to its codec's name, its shape, and its encoded delta."""

_MAX_STRAIGHT_THROUGH = 2.0
_MAX_LATENT = 4.0
_MAX_EVALUATED = 32

OnStep = Callable[[int, float], None]
"""A function called after each step with its number, from 1, and its loss."""


@dataclass(frozen=True)
class Batch:
    """A batch of calibration text.

    Attributes:
        ids: Token ids ``[b, t]`` int64.
        mask: ``[b, t]`` bool, False at padding.
        counted: ``[b, t]`` bool, True where the next token's logits are compared.
    """

    ids: Tensor
    mask: Tensor
    counted: Tensor


@dataclass(frozen=True)
class Distilled:
    """The result of distillation.

    Attributes:
        encoded: All given tensors; those that can train have their new scales (and bits).
        trained: Names of the tensors whose scales were trained.
        num_scales: Number of trained scales.
        flipped: Share of the trained tensors' bits that are no longer the sign of their delta.
        loss_before: Loss with the scales as encoded, over all batches, or over 32 evenly spaced ones if there are more.
        loss_after: Loss with the returned scales, rounded to their dtype; never above ``loss_before``, since the scales
            as encoded are returned if training increases the loss.
    """

    encoded: dict[str, Encoded]
    trained: tuple[str, ...]
    num_scales: int
    flipped: float
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
    lr: float = 5e-2,
    bit_lr: float | None = None,
    loss: Loss = "kl",
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Distilled:
    """Train the scales of ``encoded`` with AdamW and a cosine schedule; deterministic per seed on one machine.

    Args:
        model: A causal LM of the base's architecture, called as ``model(input_ids=..., attention_mask=...,
            use_cache=False).logits``. Its own weights are not used and do not change; tied weights stay tied.
        base: The base's frozen parameters by name.
        tuned: The teacher's parameters by name.
        encoded: The delta; all other parameters are those of the base.
        batches: At least one batch; the seed determines their order.
        steps: Number of steps of one batch each.
        lr: Peak learning rate of the scales' logarithms.
        bit_lr: Peak learning rate of the latent numbers whose signs are the bits; None keeps the bits fixed.
        loss: ``mse`` of the logits, as in the paper, or ``kl``: the mean divergence from the teacher in nats per token.
        seed: Seed of the order of batches.
        on_step: Called after every step.

    Raises:
        CodecError: If the loss is not finite, there is no batch, or a name is not in ``base``.
    """
    if not batches:
        raise CodecError("distillation needs at least one batch of calibration text")
    missing = sorted(set(encoded) - set(base))
    if missing:
        raise CodecError(f"the delta has a tensor {missing[0]!r} that the base does not have")
    student = _Student(base, tuned, encoded, train_bits=bit_lr is not None)
    evaluated = batches[:: -(-len(batches) // _MAX_EVALUATED)]

    def batch_loss(batch: Batch) -> Tensor:
        return _divergence(model, student.weights(), tuned, batch, loss)

    def evaluate() -> float:
        with torch.no_grad():
            return divergence(model, student.weights(), tuned, evaluated, loss)

    was_training = model.training
    model.eval()
    try:
        before = _finite(evaluate(), "before distillation: check the weights and the calibration text")
        if not student.logs or steps == 0:
            return Distilled(_as_given(encoded), (), 0, 0.0, before, before)
        optimizer = student.optimizer(lr, bit_lr or 0.0)
        _train(optimizer, batch_loss, batches, steps, seed, on_step)
        student.round_to_storage()
        after = _finite(evaluate(), "after distillation: lower the learning rate")
    finally:
        model.train(was_training)
    if after >= before:
        return Distilled(_as_given(encoded), student.names, student.num_scales, 0.0, before, before)
    return Distilled(student.result(), student.names, student.num_scales, student.flipped(), before, after)


def divergence(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    batches: Sequence[Batch],
    loss: Loss = "kl",
) -> float:
    """Compute the divergence of predictions with ``weights`` from those with ``tuned``, averaged over counted tokens.

    The model must be in evaluation mode.
    """
    tokens = [int(batch.counted.sum()) for batch in batches]
    divergences = [float(_divergence(model, weights, tuned, batch, loss)) for batch in batches]
    return math.fsum(v * n for v, n in zip(divergences, tokens, strict=True)) / max(1, sum(tokens))


def next_token_loss(model: nn.Module, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> float:
    """Compute the cross entropy of the next token with ``weights``, in nats, averaged over counted tokens."""
    total, tokens = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            logits = _logits(model, weights, batch)
        counted = batch.counted[:, :-1]
        losses = cross_entropy(logits[:, :-1][counted], batch.ids[:, 1:][counted], reduction="sum")
        total, tokens = total + float(losses), tokens + int(counted.sum())
    return total / max(1, tokens)


def _divergence(
    model: nn.Module, weights: Mapping[str, Tensor], tuned: Mapping[str, Tensor], batch: Batch, loss: Loss
) -> Tensor:
    with torch.no_grad():
        target = _logits(model, tuned, batch)
    return _LOSSES[loss](_logits(model, weights, batch), target, batch.counted)


def _as_given(encoded: EncodedTensors) -> dict[str, Encoded]:
    return {name: encoded_tensor for name, (_, _, encoded_tensor) in encoded.items()}


def _train(
    optimizer: torch.optim.Optimizer,
    batch_loss: Callable[[Batch], Tensor],
    batches: Sequence[Batch],
    steps: int,
    seed: int,
    on_step: OnStep | None,
) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(1, steps + 1):
        if not order:
            order = torch.randperm(len(batches), generator=generator).tolist()
        optimizer.zero_grad()
        value = batch_loss(batches[order.pop()])
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        loss_value = _finite(float(value.detach()), f"at step {step}: lower the learning rate")
        if on_step is not None:
            on_step(step, loss_value)


class _Student:
    """The base plus a delta with trainable scales (and bits)."""

    def __init__(
        self,
        base: Mapping[str, Tensor],
        tuned: Mapping[str, Tensor],
        encoded: EncodedTensors,
        *,
        train_bits: bool,
    ) -> None:
        self._base = {name: tensor.detach() for name, tensor in base.items()}
        self._encoded = encoded
        self._fixed: dict[str, Tensor] = {}  # base plus the unscaled part of the delta
        self._units: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        self.logs: dict[str, Tensor] = {}
        self._latents: dict[str, Tensor] = {}
        for name, (codec, shape, encoded_tensor) in encoded.items():
            old = self._base[name]
            unit, rest = unit_delta(codec, shape, encoded_tensor)
            self._fixed[name] = (
                old.to(torch.float32).reshape(as_matrix(shape)) + rest.to(old.device)
            ).detach()
            if unit is None:
                continue
            scales = encoded_tensor.payload["scales"].to(old.device, torch.float32)
            self._scales[name] = scales
            self.logs[name] = torch.zeros_like(scales, requires_grad=True)
            if train_bits and get_codec(codec).trains_bits:
                wide = expand_scales(scales, encoded[name]).clamp_min(torch.finfo(torch.float32).tiny)
                delta = tuned[name].detach().to(torch.float32) - old.to(torch.float32)
                # The encoded bit determines the sign, since the delta may have been changed before it was encoded.
                latent = delta.reshape(as_matrix(shape)).abs() / wide * unit.to(old.device)
                self._latents[name] = latent.clamp(-_MAX_LATENT, _MAX_LATENT).requires_grad_()
            else:
                self._units[name] = unit.to(old.device)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.logs)

    @property
    def num_scales(self) -> int:
        return sum(log.numel() for log in self.logs.values())

    def optimizer(self, lr: float, bit_lr: float) -> torch.optim.Optimizer:
        groups = [
            {"params": list(self.logs.values()), "lr": lr},
            {"params": list(self._latents.values()), "lr": bit_lr},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters in the base's dtype, with gradients to the trained ones."""
        made = {name: tensor for name, tensor in self._base.items() if name not in self._encoded}
        for name, weight in self._fixed.items():
            if name in self.logs:
                scales = expand_scales(self._scales[name] * self.logs[name].exp(), self._encoded[name])
                weight = weight + scales * self._unit(name)
            made[name] = weight.reshape(self._base[name].shape).to(self._base[name].dtype)
        return made

    def _unit(self, name: str) -> Tensor:
        if name not in self._latents:
            return self._units[name]
        signs: Tensor = _Sign.apply(self._latents[name])  # type: ignore[no-untyped-call]
        return signs

    def round_to_storage(self) -> None:
        """Round the scales to their storage dtype."""
        for name, log in self.logs.items():
            self._scales[name] = self._stored(name).to(self._scales[name])
            log.data.zero_()

    def _stored(self, name: str) -> Tensor:
        dtype = self._encoded[name][2].payload["scales"].dtype
        return (self._scales[name] * self.logs[name].detach().exp()).to("cpu", dtype)

    def result(self) -> dict[str, Encoded]:
        """Return the payloads with the new scales and bits, each checked by its codec."""
        made = _as_given(self._encoded)
        for name in self.logs:
            codec, shape, encoded_tensor = self._encoded[name]
            payload = {**encoded_tensor.payload, "scales": self._stored(name)}
            if name in self._latents:
                payload["bits"] = pack_signs(self._latents[name].detach().cpu())
            get_codec(codec).check(payload, shape, encoded_tensor.params)
            made[name] = Encoded(encoded_tensor.params, payload)
        return made

    def flipped(self) -> float:
        """Return the share of bits that differ from the encoded ones."""
        changed = total = 0
        for name, latent in self._latents.items():
            _, shape, encoded_tensor = self._encoded[name]
            old = unpack_signs(encoded_tensor.payload["bits"], as_matrix(shape)[1])
            changed += int(((latent.detach().cpu() >= 0) != (old > 0)).sum())
            total += latent.numel()
        return changed / max(1, total)


class _Sign(torch.autograd.Function):
    """The sign function (+1 for >= 0) with a straight-through gradient near zero."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor) -> Tensor:
        ctx.save_for_backward(latent)
        return torch.where(latent >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        latent: Tensor = ctx.saved_tensors[0]
        return gradient * (latent.abs() <= _MAX_STRAIGHT_THROUGH)


def unit_delta(codec: str, shape: Shape, encoded: Encoded) -> tuple[Tensor | None, Tensor]:
    """Decompose a delta ``[rows, cols]`` float32 into ``scales * unit + rest``.

    ``unit`` is None, and ``rest`` the whole delta, for codecs without a payload field ``scales``.
    """
    member, matrix = get_codec(codec), as_matrix(shape)
    scales = encoded.payload.get("scales")
    if scales is None:
        return None, member.decode(encoded.payload, shape, encoded.params).reshape(matrix)
    ones, zeros = (
        member.decode({**encoded.payload, "scales": fill(scales)}, shape, encoded.params).reshape(matrix)
        for fill in (torch.ones_like, torch.zeros_like)
    )
    return ones - zeros, zeros


def expand_scales(scales: Tensor, tensor: tuple[str, Shape, Encoded]) -> Tensor:
    """Expand scales ``[1]`` or ``[rows, groups]`` to multiply ``[rows, cols]``."""
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


def _mse(student: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((student - target)[mask]).square().mean()


def _kl(student: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    log_student, log_target = student[mask].log_softmax(-1), target[mask].log_softmax(-1)
    return (log_target.exp() * (log_target - log_student)).sum(-1).mean()


_LOSSES: dict[Loss, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"mse": _mse, "kl": _kl}


def _finite(value: float, when: str) -> float:
    if not math.isfinite(value):
        raise CodecError(f"the distillation loss is {value} {when}")
    return value
