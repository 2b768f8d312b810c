"""Choose tensors and codecs that minimise the error within a byte budget for the whole file.

A tensor's options are its codecs and, if a residual defers it to the next round, omission (a kind of top-k
sparsification with whole tensors as the unit; Stich et al. 2018, "Sparsified SGD with Memory").
``gym_quant.allocation`` spends the budget along the convex hulls of error over bytes. A codec's error is measured,
not assumed: a tensor is encoded, or a sample of its rows if it is large. If the mean squares of a layer's
inputs are known, the error is that of the layer's output (``gym_quant.calibration.output_error``). If the divergence of
the predictions is measured (``Sensitivity``), errors are in units of that divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from gym_quant.allocation import Picks, allocate
from gym_quant.calibration import output_error
from gym_quant.codec import as_matrix
from gym_quant.registry import get_codec
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import MERGE_VERSION
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.manifest import Manifest
from gym_fed.delta.policy import CodecChoice, choice_of, choose
from gym_fed.delta.writer import Layout, header_bytes

MENU = ("bitdelta", "bitdelta-row", "ternary", "int2", "int4", "int8", "dense")
"""Codecs that ``auto`` compares for a matrix, unless others are given."""

Sensitivity: TypeAlias = Callable[[str, Tensor], float]
"""A function from a tensor's name and decoded delta to the cost of encoding only this tensor."""

_SAMPLE = 1 << 18
_TRIES = 8
_ATTEMPTS = 16


@dataclass(frozen=True)
class BudgetOption:
    """A codec for a tensor and its error; without a codec the tensor stays in the residual."""

    choice: CodecChoice | None
    error: float

    @property
    def payload_bytes(self) -> int:
        return 0 if self.choice is None else self.choice.payload_bytes


def candidates(
    delta: Tensor,
    choice: CodecChoice,
    policy: CodecPolicy,
    importance: Tensor | None = None,
    sensitivity: Sensitivity | None = None,
    menu: Sequence[str] = MENU,
) -> list[BudgetOption]:
    """Return every encoding of a tensor that the policy allows, with its error.

    The first option is to omit it, if the policy has error feedback. If the policy's
    codec is not ``auto``, the error of encoding counts as 0.

    Args:
        delta: Its (error-corrected) delta.
        choice: Result of ``choose``; if its reason begins with ``auto``, the menu is tried instead.
        policy: Codec policy with a budget.
        importance: ``[in]`` or ``[in, in]`` moments of the layer's inputs, on one scale for all layers.
        sensitivity: Measure of the smallest encoding's cost; that of the others is scaled by their error, since a
            divergence grows with the square of a small change.
        menu: Names of the codecs to try, as in a config.
    """
    omission_error = output_error(delta, torch.zeros_like(delta), importance)
    left_out = [BudgetOption(None, omission_error)] if policy.error_feedback else []
    if policy.codec != "auto":
        return [*left_out, BudgetOption(choice, 0.0)]
    name, ways = choice.record.name, [choice]
    if choice.why.startswith("auto"):
        ways = [choice_of(name, delta, word, policy, "auto") for word in menu]
    rows, cols = as_matrix(tuple(delta.shape))
    sample = delta.reshape(rows, cols)[:: -(-rows * cols // _SAMPLE)].contiguous()
    share = rows / sample.shape[0]
    errors = [output_error(sample, _decoded(sample, way, importance), importance) for way in ways]
    options = left_out + [BudgetOption(way, share * error) for way, error in zip(ways, errors, strict=True)]
    if sensitivity is None or len(options) == 1:
        return options
    worst = _decoded(delta.reshape(rows, cols), min(ways, key=lambda way: way.payload_bytes), importance)
    lost = output_error(delta, worst.reshape(delta.shape), importance)
    unit = sensitivity(name, worst.reshape(delta.shape)) / lost if lost else 0.0
    return [replace(candidate, error=unit * candidate.error) for candidate in options]


def fit(
    options: Mapping[str, Sequence[BudgetOption]],
    spec: BaseSpec,
    extra: Mapping[str, str],
    max_bits_per_weight: float,
    version: int = MERGE_VERSION,
) -> list[CodecChoice]:
    """Choose one candidate per tensor so that the whole file, including its header, is within the budget.

    ``version`` is ``SoupRecipe.merge_version``: version 1 reproduces the choices of earlier releases.

    Raises:
        GymError: ``CONFIG_INVALID`` if no tensor fits, or if the tensors that must not be omitted do not all fit.
    """
    budget = math.floor(spec.num_parameters * max_bits_per_weight / 8)
    if version == 1 and any(len(choices) > 2 for choices in options.values()):
        first = _fit_by_payload(options, spec, extra, budget)
        if first:
            return first
        options = {name: [choices[0], replace(choices[1], error=0.0)] for name, choices in options.items()}

    def chosen(picks: Picks) -> list[CodecChoice]:
        choices = (options[name][index].choice for name, index in picks.items())
        return [choice for choice in choices if choice is not None]

    sizes = {name: [(c.payload_bytes, c.error) for c in choices] for name, choices in options.items()}
    picks = allocate(sizes, budget, lambda picks: file_bytes(chosen(picks), spec, extra), _TRIES)
    if picks is None and all(choices[0].choice is not None for choices in options.values()):
        least = [min(choices, key=lambda c: c.payload_bytes).choice for choices in options.values()]
        smallest = file_bytes([choice for choice in least if choice is not None], spec, extra)
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"max_bits_per_weight: {max_bits_per_weight} is {counted(budget, 'byte')}, but the smallest codecs "
            f"take {smallest}",
            f"raise it above {8 * smallest / spec.num_parameters:.2f}, or use smaller codecs for embeddings and norms",
        )
    if options and (picks is None or not chosen(picks)):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"max_bits_per_weight allows {counted(budget, 'byte')}, too few for any tensor of {spec.model_name!r}",
            "raise max_bits_per_weight",
        )
    picked = (_in_numbers(options[name], index) for name, index in (picks or {}).items())
    return [choice for choice in picked if choice is not None]


def _fit_by_payload(
    options: Mapping[str, Sequence[BudgetOption]], spec: BaseSpec, extra: Mapping[str, str], budget: int
) -> list[CodecChoice]:
    """Allocate as in merge version 1: reduce the payloads until they fit with the header; [] if they cannot.

    Some bytes of the budget stay unused.
    """
    sizes = {
        name: [(c.payload_bytes, c.error) for c in tensor_options] for name, tensor_options in options.items()
    }
    room = budget - file_bytes([], spec, extra)
    for _ in range(_ATTEMPTS):
        picks = allocate(sizes, room) if room > 0 else None
        if picks is None:
            return []
        picked = (_in_numbers(tensor_options, picks[name]) for name, tensor_options in options.items())
        choices = [choice for choice in picked if choice is not None]
        over = file_bytes(choices, spec, extra) - budget
        if over <= 0:
            return choices
        room = min(room, sum(choice.payload_bytes for choice in choices)) - over
    return []


def require_budget(
    choices: Sequence[CodecChoice], spec: BaseSpec, extra: Mapping[str, str], max_bits_per_weight: float
) -> None:
    """Refuse mandatory choices whose file exceeds the budget.

    Raises:
        GymError: ``CONFIG_INVALID`` with both sizes.
    """
    budget = math.floor(spec.num_parameters * max_bits_per_weight / 8)
    size = file_bytes(choices, spec, extra)
    if size > budget:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"the factors take {counted(size, 'byte')}, but max_bits_per_weight allows {budget} for "
            f"{spec.model_name!r}",
            "raise max_bits_per_weight, lower factor_bits (with factors: auto), or train a smaller rank",
        )


def estimated_bytes(names: Iterable[str], policy: CodecPolicy, spec: BaseSpec) -> int:
    """Return an upper bound of the file size for a policy, before any values exist."""
    empty = ((name, torch.empty(spec.shapes[name], device="meta")) for name in names)
    size = file_bytes([choose(name, delta, policy) for name, delta in empty], spec, {})
    if policy.max_bits_per_weight is None:
        return size
    budget = math.floor(spec.num_parameters * policy.max_bits_per_weight / 8)
    return budget if policy.codec == "auto" else min(size, budget)


def file_bytes(choices: Sequence[CodecChoice], spec: BaseSpec, extra: Mapping[str, str]) -> int:
    """Return the exact file size in bytes for these choices."""
    manifest = Manifest.of(spec.model_name, spec.digest, [c.record for c in choices], extra)
    layout = Layout.of(manifest.tensors)
    return len(header_bytes(manifest, layout)) + layout.data_bytes


def _decoded(delta: Tensor, way: CodecChoice, importance: Tensor | None) -> Tensor:
    """Encode and decode ``[rows, cols]`` with a codec."""
    codec, params = get_codec(way.record.codec), way.record.params
    weighed = {"importance": importance} if codec.weighs_inputs else {}
    encoded = codec.encode(delta, **weighed, **params)
    return codec.decode(encoded.payload, tuple(delta.shape), encoded.params)


def _in_numbers(options: Sequence[BudgetOption], index: int) -> CodecChoice | None:
    """Add figures to the reason of a choice, if there was an alternative."""
    choice = options[index].choice
    if choice is None or choice.why != "auto":
        return choice
    bits = 8 * choice.payload_bytes / math.prod(choice.record.shape)
    if options[0].choice is not None:
        return replace(choice, why=f"auto: {bits:.2f} bits per weight; cost {options[index].error:.3g}")
    lost = options[index].error / max(options[0].error, 1e-300)
    why = f"auto: {bits:.2f} bits per weight lose {lost:.1%} of its energy; other tensors gain more from more bits"
    return replace(choice, why=why)
