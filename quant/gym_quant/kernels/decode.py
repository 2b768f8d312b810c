"""The small operators of a decoder layer: residual and RMS norm, norm and rotation of heads, and gated activation.

``operators()`` selects the implementation once for the many calls of a step. A row's result depends only on that row,
and not on the number of threads. Native paths agree to the last bit; native paths and the torch reference are within
2e-6 of the float64 result, relative to the row's largest value (tested).

NaN and infinities stay in their row. ``exp`` is constant beyond 88, where ``silu`` has reached its limit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native


@dataclass(frozen=True, eq=False)
class NormWeight:
    """An RMS norm's weight: ``[size]`` float32, contiguous, on the CPU."""

    weight: Tensor
    eps: float

    def __post_init__(self) -> None:
        w = self.weight
        if w.ndim != 1 or w.dtype != torch.float32 or not w.is_contiguous() or w.device.type != "cpu":
            raise CodecError(
                f"a norm's weight is {list(w.shape)} {w.dtype} on {w.device}, not [size] float32"
            )


@dataclass(frozen=True, eq=False)
class NormDeltas:
    """The variants' deltas of a norm's weight.

    Attributes:
        values: ``[variants, size]`` float32, contiguous.
        owner: Each row's variant, or -1: ``[rows]`` int64, contiguous.
    """

    values: Tensor
    owner: Tensor


class Operators(ABC):
    """The operators of one path. Tensors are float32 on the CPU; inputs are not checked."""

    @abstractmethod
    def add_norm(
        self, hidden: Tensor, term: Tensor | None, norm: NormWeight, deltas: NormDeltas | None, out: Tensor
    ) -> None:
        """Compute ``hidden += term``, then ``out = norm(hidden)``; all ``[rows, size]``, contiguous."""

    @abstractmethod
    def rotate(
        self,
        heads: Tensor,
        cosine: Tensor,
        sine: Tensor,
        norm: NormWeight | None = None,
        deltas: NormDeltas | None = None,
    ) -> None:
        """Normalise (optionally) and rotate ``heads`` ``[rows, heads, dim]`` in place.

        Args:
            heads: Contiguous within a row; rows may be strided.
            cosine: ``[rows, dim]``, contiguous.
            sine: As ``cosine``.
            norm: A head's norm.
            deltas: The norm's deltas.
        """

    @abstractmethod
    def gate(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """Compute ``out = silu(gate) * up``, ``[rows, size]``; rows of ``gate`` and ``up`` may be strided equally."""


def operators(path: str | None = None) -> Operators:
    """Return the operators of ``path`` (default ``dispatch.path()``), with torch's current number of threads."""
    chosen = path or dispatch.path()
    return _TorchOperators() if chosen == "torch" else _NativeOperators(chosen, torch.get_num_threads())


class _NativeOperators(Operators):
    def __init__(self, path: str, threads: int) -> None:
        self._how = (native.CODES[path], threads)
        library = native.library_holding_lock()
        self._add_norm, self._rotate, self._gate = library.gq_add_norm, library.gq_rotate, library.gq_gate

    def add_norm(
        self, hidden: Tensor, term: Tensor | None, norm: NormWeight, deltas: NormDeltas | None, out: Tensor
    ) -> None:
        added = None if term is None else term.data_ptr()
        rows, size = hidden.shape
        weights = (norm.weight.data_ptr(), *_pointers(deltas), norm.eps)
        self._add_norm(*self._how, hidden.data_ptr(), added, *weights, rows, size, out.data_ptr())

    def rotate(
        self,
        heads: Tensor,
        cosine: Tensor,
        sine: Tensor,
        norm: NormWeight | None = None,
        deltas: NormDeltas | None = None,
    ) -> None:
        rows, count, dim = heads.shape
        weights = (
            (None, None, None, 0.0)
            if norm is None
            else (norm.weight.data_ptr(), *_pointers(deltas), norm.eps)
        )
        angles = (cosine.data_ptr(), sine.data_ptr())
        self._rotate(*self._how, heads.data_ptr(), heads.stride(0), rows, count, dim, *weights, *angles)

    def gate(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        inputs = (gate.data_ptr(), up.data_ptr(), gate.stride(0), *out.shape)
        self._gate(*self._how, *inputs, out.data_ptr())


class _TorchOperators(Operators):
    """The torch reference, and the path without native code."""

    def add_norm(
        self, hidden: Tensor, term: Tensor | None, norm: NormWeight, deltas: NormDeltas | None, out: Tensor
    ) -> None:
        if term is not None:
            hidden += term
        out.copy_(_rms_norm(hidden, norm.weight, norm.eps, *_parts(deltas)))

    def rotate(
        self,
        heads: Tensor,
        cosine: Tensor,
        sine: Tensor,
        norm: NormWeight | None = None,
        deltas: NormDeltas | None = None,
    ) -> None:
        x = heads if norm is None else _rms_norm(heads, norm.weight, norm.eps, *_parts(deltas))
        heads.copy_(_rotated(x, cosine, sine))

    def gate(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        torch.mul(functional.silu(gate), up, out=out)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, deltas: Tensor | None, owner: Tensor | None) -> Tensor:
    """Compute ``(weight + delta of the row's owner) * x / sqrt(mean(x^2) + eps)``, with the two products separate."""
    normal = functional.rms_norm(x, x.shape[-1:], eps=eps)
    scaled = weight * normal
    if deltas is None or owner is None:
        return scaled
    theirs = torch.where(owner[:, None] >= 0, deltas[owner.clamp_min(0)], 0.0)
    return scaled + theirs.view(len(x), *(1,) * (x.ndim - 2), -1) * normal


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate heads ``[rows, heads, dim]`` by angles ``[rows, dim]``, pairing a head's halves (RoPE as in Llama)."""
    low, high = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat((-high, low), dim=-1) * sine[:, None]


def _pointers(deltas: NormDeltas | None) -> tuple[int | None, int | None]:
    return (None, None) if deltas is None else (deltas.values.data_ptr(), deltas.owner.data_ptr())


def _parts(deltas: NormDeltas | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if deltas is None else (deltas.values, deltas.owner)
