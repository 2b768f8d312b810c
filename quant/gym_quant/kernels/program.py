"""A program of native calls for a decoder step, built once and run with one call per step.

For a few rows, a call takes microseconds, as does the Python code between two calls. A program makes the same calls
with the same arguments, so its results are bit-identical. Arguments that change between steps are named slots. Tensors
are float32 on the CPU, contiguous except for the rows of outputs, and must not move. A program does not check arguments
or keep tensors alive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gym_quant.kernels import native
from gym_quant.kernels.attention import PagedLayer
from gym_quant.kernels.decode import NormWeight

Word = int | float | str | Tensor | None
"""An argument of a call: a number, the name of a slot, or a tensor, whose address is passed."""

_ADD_NORM, _MULTIPLY, _ADD_BIAS, _ROTATE, _ATTEND, _GATE, _ADD_LOOKUP, _ADD_FACTORS = range(8)


class Program:
    """Native calls in the order in which they were added.

    Slots: ``spans`` and ``count`` from ``PagedSpans.table_for``; ``owners``, the address of each row's variant or -1
    (``[rows]`` int64); ``cosine`` and ``sine``, the addresses of ``[rows, dim]``.

    Args:
        path: A native path.
    """

    def __init__(self, path: str) -> None:
        self._path = native.CODES[path]
        self._words: list[int] = []
        self._slots: dict[str, list[int]] = {}
        self._made: tuple[np.ndarray[tuple[int], np.dtype[np.int64]], dict[str, np.ndarray]] | None = None

    def add_norm(
        self, hidden: Tensor, term: Tensor | None, norm: NormWeight, deltas: Tensor | None, out: Tensor
    ) -> None:
        """Add ``Operators.add_norm``; ``deltas`` are those of ``owners``."""
        owners = None if deltas is None else "owners"
        self._add(_ADD_NORM, hidden, term, norm.weight, deltas, owners, float(norm.eps), *hidden.shape, out)

    def rotate(self, heads: Tensor, norm: NormWeight | None, deltas: Tensor | None) -> None:
        """Add ``Operators.rotate`` by ``cosine`` and ``sine``."""
        owners = None if deltas is None else "owners"
        weight, eps = (None, 0.0) if norm is None else (norm.weight, float(norm.eps))
        sizes = heads.stride(0), *heads.shape
        self._add(_ROTATE, heads, *sizes, weight, deltas, owners, eps, "cosine", "sine")

    def gate(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """Add ``Operators.gate``."""
        self._add(_GATE, gate, up, gate.stride(0), *out.shape, out)

    def multiply(self, linear: int, x: Tensor, y: Tensor) -> None:
        """Add ``y = x @ W.T`` for few rows; ``linear`` is ``LinearTiles.address``."""
        self._add(_MULTIPLY, linear, x, len(x), y, y.stride(0))

    def add_bias(self, bias: Tensor, y: Tensor) -> None:
        """Add ``y += bias``; a bias ``[variants, size]`` is indexed by ``owners``."""
        owners = None if bias.ndim == 1 else "owners"
        self._add(_ADD_BIAS, bias, owners, *y.shape, y, y.stride(0))

    def attend(
        self,
        layer: PagedLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """Add ``attention.attend`` over the rows of ``spans``."""
        strides = [tensor.stride(0) for tensor in (query, key, value)]
        sizes = query.shape[1], layer.kv_heads, layer.dim, layer.value_dim
        spans = ("spans", "count", layer.data, layer.kind)
        self._add(
            _ATTEND,
            query,
            key,
            value,
            *strides,
            out,
            out.stride(0),
            *spans,
            *sizes,
            float(scale),
            window or 0,
        )

    def add_by_lookup(self, wide: bool, x: Tensor, y: Tensor, matrices: tuple[int, int]) -> None:
        """Add ``gq_lookup_add`` for the sign deltas of ``owners``; ``matrices`` is a number and an address."""
        self._add(_ADD_LOOKUP, int(wide), x, *x.shape, "owners", y, y.stride(0), *matrices)

    def add_factors(self, wide: bool, x: Tensor, y: Tensor, matrices: tuple[int, int]) -> None:
        """Add ``gq_factors_add`` for the factors of ``owners``."""
        self._add(_ADD_FACTORS, int(wide), x, *x.shape, "owners", y, y.stride(0), *matrices)

    def run(self, **slots: int) -> None:
        """Run all calls with these slot values.

        Raises:
            MemoryError: If a call could not allocate its workspace.
        """
        if self._made is None:
            places = {name: np.array(at) for name, at in self._slots.items()}
            self._made = np.array(self._words, dtype=np.int64), places
        words, places = self._made
        for name, at in places.items():
            words[at] = slots[name]
        where = words.ctypes.data, len(words)
        if native.library().gq_run(self._path, torch.get_num_threads(), native.features(), *where):
            raise MemoryError("gq_run: no memory for a workspace")

    def _add(self, call: int, *words: Word) -> None:
        self._words.append(call)
        self._words += self._numbers(words)

    def _numbers(self, words: tuple[Word, ...]) -> Iterator[int]:
        for at, word in enumerate(words, len(self._words)):
            if isinstance(word, Tensor):
                yield word.data_ptr()
            elif isinstance(word, str):
                self._slots.setdefault(word, []).append(at)
                yield 0
            elif isinstance(word, float):
                yield int.from_bytes(struct.pack("<f", word), "little")
            else:
                yield word or 0
