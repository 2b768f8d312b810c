"""Encode a fine-tune, tuned minus base, under a policy, with error feedback and a byte budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gym_quant.codec import CodecError, Encoded, Payload, check_finite, sum_of_squares
from gym_quant.codecs.lora import Lora
from gym_quant.registry import get_codec
from torch import Tensor, nn

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import MERGE_VERSION
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, Tensors, checked_tensors
from gym_fed.delta.budget import MENU, BudgetOption, Sensitivity, candidates, fit, require_budget
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.low_rank import Factors, plain_factors, quantise_factors
from gym_fed.delta.manifest import TensorRecord
from gym_fed.delta.policy import CodecChoice, adding_codec, choose, parts_of
from gym_fed.delta.writer import DeltaEntry, write_delta

DeltaSource = Callable[[str], Tensor]
"""A function from a tensor's name to its true delta; called twice per tensor, it must return equal values."""

Coded = Mapping[str, tuple[str, tuple[int, ...], Encoded]]
"""A mapping from a tensor's name to its codec's name, shape and encoded delta."""

Write = Callable[[CodecChoice, Tensor], Encoded]
"""A function from a choice and an error-corrected delta to the encoded delta."""

Refine = Callable[[Coded], Mapping[str, Encoded]]
"""A function that improves encoded tensors of the same layout, such as by distilling scales."""

_FINEST = -30
"""Exponent of the finest step. Sums have 31 bits on the finest grid of all rounds, so a round of tiny deltas could
leave no room for later ones."""

_MAX_BITS = 20
"""Bits of the largest code. A residual from larger deltas is spread over several rounds instead."""


@dataclass(frozen=True)
class TensorReport:
    """The encoding of one tensor.

    Attributes:
        codec: Codec; None for a tensor that is not in the file.
        why: The reason for the choice.
        payload_bytes: Bytes of the tensor in the file.
        energy: Squared L2 norm of its error-corrected delta.
    """

    name: str
    codec: str | None
    why: str
    payload_bytes: int
    energy: float


@dataclass(frozen=True)
class EncodeReport:
    """The encoded file.

    Attributes:
        sha256: Lower-case hex sha256 of the file.
        size_bytes: Size of the whole file.
        norm: L2 norm of the delta that the file decodes to.
        bits_per_weight: Bits of the whole file for each weight of the base.
        tensors: One report per tensor of the base, sorted by name.
    """

    sha256: str
    size_bytes: int
    norm: float
    bits_per_weight: float
    tensors: tuple[TensorReport, ...] = field(repr=False)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of changed tensors that did not fit the budget; they stay in the residual."""
        return tuple(t.name for t in self.tensors if t.codec is None and t.energy > 0.0)


def encode_delta(
    tuned: nn.Module | Tensors,
    base: nn.Module | Tensors,
    policy: CodecPolicy,
    out_path: str | Path,
    spec: BaseSpec,
    residual: ErrorFeedback | None = None,
    extra: Mapping[str, str] | None = None,
    importance: Mapping[str, Tensor] | None = None,
    refine: Refine | None = None,
    on_tensor: Callable[[str], None] | None = None,
) -> EncodeReport:
    """Write ``tuned - base`` (float32) as a ``.gymdelta`` of ``spec``.

    The new residual is recorded in ``residual``, and takes effect when the caller commits it. ``importance`` has second
    moments of layers' inputs by name of their weight (``gym_quant.calibration.collect_input_moments``): the grids
    of int8 to binary, and the choices of codec ``auto`` under a budget, then minimise the error of those layers'
    outputs instead of that of their weights. ``refine`` gets all encoded tensors together and may improve their scales
    (``gym_fed.quantization.distiller``); the residual includes its changes. Embeddings and head are identified
    by the tuned model or the base if one is a module, or else by their names. ``on_tensor`` is called with
    the name of each tensor before it is read; it may raise to stop the encoding.

    Raises:
        GymError: ``BASE_MISMATCH`` if tensors differ from the base's, ``DELTA_INVALID`` for values that are
            not finite, ``CONFIG_INVALID`` if policy and ``residual`` do not match or the budget is too small.
    """
    new, old = checked_tensors(tuned, spec, "tuned"), checked_tensors(base, spec, "base")

    def difference(name: str) -> Tensor:
        if on_tensor is not None:
            on_tensor(name)
        return new[name].to("cpu", torch.float32) - old[name].to("cpu", torch.float32)

    model = next((given for given in (tuned, base) if isinstance(given, nn.Module)), None)
    parts = parts_of(spec.shapes, model)
    return encode_source(difference, policy, out_path, spec, residual, extra, importance, refine, parts=parts)


def encode_source(
    source: DeltaSource,
    policy: CodecPolicy,
    out_path: str | Path,
    spec: BaseSpec,
    residual: ErrorFeedback | None = None,
    extra: Mapping[str, str] | None = None,
    importance: Mapping[str, Tensor] | None = None,
    refine: Refine | None = None,
    *,
    parts: Mapping[str, str] | None = None,
    sensitivity: Sensitivity | None = None,
    menu: Sequence[str] = MENU,
    version: int = MERGE_VERSION,
) -> EncodeReport:
    """Encode deltas from any source like ``encode_delta``, with one tensor in memory at a time.

    ``parts`` gives each tensor's part (``parts_of``; by default from its name). ``sensitivity`` measures what encoding
    costs; ``menu`` names the codecs that ``auto`` compares under a budget (``gym_fed.delta.budget``); ``version`` is
    the merge version, which determines how a soup's budget is split.
    """
    if policy.error_feedback != (residual is not None):
        given = "no residual was given" if residual is None else "a residual was given"
        problem = f"the codec policy has error_feedback: {policy.error_feedback}, but {given}"
        raise GymError(ErrorCode.CONFIG_INVALID, problem)
    if residual is not None:
        residual.begin(policy.decay)

    def corrected(name: str) -> Tensor:
        delta = source(name)
        return delta if residual is None else residual.compensated(name, delta)

    choices: dict[str, CodecChoice] = {}
    energy: dict[str, float] = {}
    exponents: dict[str, int] = {}
    adding = adding_codec(policy)
    options: dict[str, list[BudgetOption]] = {}
    parts = parts_of(spec.shapes) if parts is None else parts
    for name in sorted(spec.shapes):
        delta = corrected(name)
        energy[name] = energy_of(name, delta)
        if adding is not None and energy[name] > 0.0:
            before = None if residual is None else residual.exponents.get(name)
            exponent = adding.exponent_of(delta if before is None else source(name), before)
            largest = math.frexp(float(delta.abs().max()))[1]
            exponents[name] = max(exponent, largest - _MAX_BITS, _FINEST)
        choices[name] = choose(name, delta, policy, parts[name], exponents.get(name))
        if policy.max_bits_per_weight is not None and energy[name] > 0.0:
            weights = _relative(name, importance)
            options[name] = candidates(delta, choices[name], policy, weights, sensitivity, menu)
    fitting = changed = [choice for name, choice in choices.items() if energy[name] > 0.0]
    if policy.max_bits_per_weight is not None:
        fitting = fit(options, spec, extra or {}, policy.max_bits_per_weight, version)
        choices.update((choice.record.name, choice) for choice in fitting)

    squares: list[float] = []
    write = functools.partial(
        _encode, importance=importance or {}, gain=policy.scale_gain, exponents=exponents
    )
    refined = refine(_coded(fitting, corrected, write)) if refine is not None else {}
    entries = [_entry(choice, corrected, residual, squares, write, refined) for choice in fitting]
    info = write_delta(out_path, entries, spec, extra)
    kept_names = {choice.record.name for choice in fitting}
    if residual is not None:
        residual.record_exponents(exponents)
        for choice in changed:
            if choice.record.name not in kept_names:
                residual.record(choice.record.name, corrected(choice.record.name))
    reports = tuple(_report(choices[n], energy[n], n in kept_names) for n in sorted(choices))
    bits = 8.0 * info.size_bytes / spec.num_parameters
    return EncodeReport(info.sha256, info.size_bytes, math.sqrt(math.fsum(squares)), bits, reports)


def lora_delta(
    factors: Mapping[str, Factors],
    out_path: str | Path,
    spec: BaseSpec,
    extra: Mapping[str, str] | None = None,
    policy: CodecPolicy | None = None,
    residual: ErrorFeedback | None = None,
    values: Mapping[str, Tensor] | None = None,
    on_tensor: Callable[[str], None] | None = None,
) -> EncodeReport:
    """Write trained LoRA factors: name to (A ``[r, in]``, B ``[out, r]``, scaling).

    Without a policy they are written unquantised in bfloat16, and with ``factors: bfloat16`` or ``float32`` in that
    format. Otherwise they are quantised by the policy's ``factors``, ``factor_bits`` and ``factor_group_size`` (its
    other codecs are for full deltas). Error feedback works on the product: factors of two rounds span different
    spaces, so that only products add up. The file has the best rank-r approximation of this round's product plus the
    residual, and the new residual is the difference to the decoded product.

    ``on_tensor`` is called with the name of each factored tensor before it is quantised; it may raise to stop.

    ``values`` are the differences of tensors that have no factors, such as saved modules, trained tokens, norms and
    biases (``gym_fed.delta.factors.lora_change``). They are written dense, in the policy's ``dense_dtype``, and have no
    error feedback.

    Raises:
        GymError: ``DELTA_INVALID`` naming the tensor whose factors do not fit the base or are not finite;
            ``CONFIG_INVALID`` if policy and ``residual`` do not match, and for a file over ``max_bits_per_weight``.
    """
    quantising = policy if policy is not None and policy.quantises_factors else None
    if (residual is not None) != (quantising is not None and quantising.error_feedback):
        given = "no residual was given" if residual is None else "a residual was given"
        reason = "without a policy factors are written unquantised"
        if policy is not None:
            reason = f"factors are {policy.factors}, error_feedback: {policy.error_feedback}"
        remedy = "quantised factors with error_feedback need a residual, and nothing else does"
        raise GymError(ErrorCode.CONFIG_INVALID, f"{given}, but {reason}", remedy)
    if quantising is None:
        written = plain_factors(factors, "bfloat16" if policy is None else policy.factors)
    else:
        if residual is not None:
            residual.begin(quantising.decay)
        written = quantise_factors(factors, quantising, spec, residual, on_tensor)
    entries: list[DeltaEntry] = []
    reports: list[TensorReport] = []
    for name, factors_written in sorted(written.items()):
        record, size = factors_written.choice.record, factors_written.choice.payload_bytes
        payload = functools.partial(dict[str, Tensor], factors_written.payload)
        entries.append(DeltaEntry(name, record.shape, record.codec, record.params, payload))
        energy = Lora().norm(factors_written.payload, record.shape, record.params) ** 2
        reports.append(TensorReport(name, record.codec, factors_written.choice.why, size, energy))
    choices = [factors_written.choice for factors_written in written.values()]
    for name, delta in sorted((values or {}).items()):
        dtype = "bfloat16" if policy is None else policy.dense_dtype
        entry = DeltaEntry.of(name, delta, "dense", dtype=dtype)
        entries.append(entry)
        size = get_codec("dense").payload_bytes(tuple(delta.shape), entry.params)
        why = "values: factors of its change would not be smaller"
        choices.append(CodecChoice(TensorRecord(name, entry.shape, "dense", entry.params), size, why))
        reports.append(TensorReport(name, "dense", why, size, energy_of(name, delta)))
    if policy is not None and policy.max_bits_per_weight is not None:
        require_budget(choices, spec, extra or {}, policy.max_bits_per_weight)
    info = write_delta(out_path, entries, spec, extra)
    norm = math.sqrt(math.fsum(report.energy for report in reports))
    bits = 8.0 * info.size_bytes / spec.num_parameters
    return EncodeReport(info.sha256, info.size_bytes, norm, bits, tuple(reports))


def _relative(name: str, importance: Mapping[str, Tensor] | None) -> Tensor | None:
    """Return a layer's second moments relative to their mean over all layers; missing ones count as average."""
    if not importance or name not in importance:
        return None
    squares = [m.diagonal() if m.dim() == 2 else m for m in importance.values()]
    mean = math.fsum(float(moments.double().mean()) for moments in squares) / len(squares)
    return importance[name] / mean if mean > 0.0 else None


def energy_of(name: str, delta: Tensor) -> float:
    """Return the squared norm of a delta.

    Raises:
        GymError: ``DELTA_INVALID`` naming the tensor whose values are not finite.
    """
    try:
        check_finite(delta, "delta")
    except CodecError as error:
        remedy = "training diverged: lower the learning rate"
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}", remedy) from error
    return sum_of_squares(delta)


def _coded(choices: Sequence[CodecChoice], corrected: DeltaSource, write: Write) -> Coded:
    """Return all encoded tensors as input of ``Refine``."""
    records = [(choice, choice.record) for choice in choices]
    return {r.name: (r.codec, r.shape, write(choice, corrected(r.name))) for choice, r in records}


def _encode(
    choice: CodecChoice,
    delta: Tensor,
    importance: Mapping[str, Tensor],
    gain: float,
    exponents: Mapping[str, int],
) -> Encoded:
    record, codec = choice.record, get_codec(choice.record.codec)
    more: dict[str, Any] = {"importance": importance.get(record.name)} if codec.weighs_inputs else {}
    if codec.adds_up:
        more["exponent"] = exponents.get(record.name)
    try:
        encoded = codec.encode(delta, **more, **record.params)
        if gain == 1.0 or not codec.takes_gain:
            return encoded
        payload = codec.scaled(encoded.payload, record.shape, encoded.params, gain)
        codec.check(payload, record.shape, encoded.params)
        return Encoded(encoded.params, payload)
    except CodecError as error:
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {record.name!r}: {error}") from error


def _entry(
    choice: CodecChoice,
    corrected: DeltaSource,
    residual: ErrorFeedback | None,
    squares: list[float],
    write: Write,
    refined: Mapping[str, Encoded],
) -> DeltaEntry:
    """Return a lazy entry for the writer, which encodes on demand and records norm and loss."""
    record, codec = choice.record, get_codec(choice.record.codec)

    def payload() -> Payload:
        delta = corrected(record.name)
        encoded = refined.get(record.name) or write(choice, delta)
        squares.append(codec.norm(encoded.payload, record.shape, encoded.params) ** 2)
        if residual is not None:
            residual.record(record.name, delta - codec.decode(encoded.payload, record.shape, encoded.params))
        return encoded.payload

    return DeltaEntry(record.name, record.shape, record.codec, dict(record.params), payload)


def _report(choice: CodecChoice, energy: float, is_encoded: bool) -> TensorReport:
    name = choice.record.name
    if is_encoded:
        return TensorReport(name, choice.record.codec, choice.why, choice.payload_bytes, energy)
    why = "unchanged" if energy == 0.0 else "over max_bits_per_weight; stays in the residual"
    return TensorReport(name, None, why, 0, energy)
