"""Mixed precision: under a byte budget every tensor gets the codec whose bytes remove the most error.

Sensitivity is measured, not assumed: a tensor is encoded with each codec on the menu (on a sample of its rows where
it is large) and the squared error of what it decodes to is taken; where the mean squares of a layer's inputs are
given, the error of the layer's output (``gym_quant.calibration.output_error``). ``gym_quant.allocation`` then spends
the budget along convex hulls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from gym_quant import get_codec
from gym_quant.allocation import allocate
from gym_quant.calibration import output_error
from gym_quant.codec import as_matrix
from gym_quant.levels import LevelCodec
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.budget import file_bytes
from gym_fed.delta.policy import Choice, choice_of, choose

MENU = ("bitdelta", "bitdelta-row", "ternary", "int2", "int4", "int8", "dense")
"""Codecs that ``auto`` weighs for a matrix; leaving it in the residual is an option too."""

_SAMPLE = 1 << 18
_ATTEMPTS = 16


@dataclass(frozen=True)
class Candidate:
    """A choice for a tensor and the error it leaves; no choice leaves the tensor in the residual."""

    choice: Choice | None
    error: float

    @property
    def payload_bytes(self) -> int:
        return 0 if self.choice is None else self.choice.payload_bytes


def candidates(
    name: str, delta: Tensor, policy: CodecPolicy, importance: Tensor | None = None
) -> list[Candidate]:
    """Every way to write a tensor that the policy leaves open, with its error; the first is not to write it.

    Args:
        name: The tensor.
        delta: Its (error-corrected) delta.
        policy: With codec ``auto``; tensors with a policy of their own (small ones, embeddings, head) have one way.
        importance: ``[in]`` mean squares of the layer's inputs, relative to other layers' as they are.
    """
    rows, cols = as_matrix(tuple(delta.shape))
    step = -(-rows * cols // _SAMPLE)
    sample = delta.reshape(rows, cols)[::step].contiguous()
    share = rows / sample.shape[0]
    plain = choose(name, delta, policy)
    wanted = [plain]
    if plain.why.startswith("auto"):
        wanted = [choice_of(name, delta, codec, policy, "auto") for codec in MENU]
    found = [Candidate(None, output_error(delta, torch.zeros_like(delta), importance))]
    for choice in wanted:
        codec, params = get_codec(choice.record.codec), choice.record.params
        weighed = {"importance": importance} if isinstance(codec, LevelCodec) else {}
        encoded = codec.encode(sample, **weighed, **params)
        decoded = codec.decode(encoded.payload, tuple(sample.shape), encoded.params)
        found.append(Candidate(choice, share * output_error(sample, decoded, importance)))
    return found


def fit_mixed(
    options: Mapping[str, Sequence[Candidate]], spec: BaseSpec, extra: Mapping[str, str], budget: int
) -> list[Choice]:
    """One candidate of every tensor so that the whole file, header too, is at most ``budget`` bytes long.

    The header depends on the choices, so the payload's share of the budget shrinks until both fit. Empty when
    nothing fits.
    """
    room = budget - file_bytes([], spec, extra)
    for _ in range(_ATTEMPTS):
        sizes = {name: [(c.payload_bytes, c.error) for c in found] for name, found in options.items()}
        picked = allocate(sizes, room) if room > 0 else None
        if picked is None:
            return []
        kept = [_told(found[picked[name]].choice, found) for name, found in options.items()]
        chosen = [choice for choice in kept if choice is not None]
        over = file_bytes(chosen, spec, extra) - budget
        if over <= 0:
            return chosen
        room = min(room, sum(choice.payload_bytes for choice in chosen)) - over
    return []


def _told(choice: Choice | None, found: Sequence[Candidate]) -> Choice | None:
    """The choice with its reason in numbers."""
    if choice is None or choice.why != "auto":
        return choice
    error = next(c.error for c in found if c.choice is choice)
    rows, cols = as_matrix(choice.record.shape)
    bits, lost = 8 * choice.payload_bytes / (rows * cols), error / max(found[0].error, 1e-300)
    why = f"auto: {bits:.2f} bits a weight leave {lost:.1%} of its energy; more is worth more elsewhere"
    return Choice(choice.record, choice.payload_bytes, why)
