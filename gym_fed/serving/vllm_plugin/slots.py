"""Hold the variants in vLLM's slots, layer by layer, and compute the terms that they add to a step.

A slot holds one active variant (``--max-loras``). ``StepSlots`` has the slot of each row of a step. On a CPU, a slot
refers to the variant's resident matrices. On CUDA, every layer has static buffers for all slots, which CUDA graphs
require: activation copies a variant into them, and the kernel reads the rows' slots on the device. The module does not
import vllm, so that tests run without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gym_quant import CodecError
from gym_quant.kernels import SignMatrix, dispatch
from gym_quant.kernels.resident import ResidentSigns, SignBatch
from gym_quant.kernels.triton_slots import add_signed_slots
from gym_quant.resident import IndexArray
from torch import Tensor

_SHIFTS = tuple(range(8))
_library: Any = torch.library  # without annotations


class StepSlots:
    """The slot of every row of the current step; -1 for rows without a variant of this plug-in.

    Args:
        size: Maximum number of rows of a step.
        device: The device of the model.

    Attributes:
        tokens: The slot of each token, ``[size] int32``. Static, because CUDA graphs read it; -1 beyond the step's
            rows.
        samplers: The slot of each row of logits, ``[size] int32``.
        token_index: The values of ``tokens`` as ``[rows] int64`` on the host, for CPU kernels.
        sampler_index: The values of ``samplers`` on the host.
        used: True if any token has a slot.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tokens = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.samplers = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.token_index: IndexArray = np.empty(0, dtype=np.int64)
        self.sampler_index: IndexArray = np.empty(0, dtype=np.int64)
        self.used = False

    def update(self, tokens: Sequence[int], samplers: Sequence[int]) -> None:
        """Set the slots of a step's tokens and rows of logits."""
        self.token_index = np.asarray(tokens, dtype=np.int64)
        self.sampler_index = np.asarray(samplers, dtype=np.int64)
        self.used = bool((self.token_index >= 0).any())
        for static, index in ((self.tokens, self.token_index), (self.samplers, self.sampler_index)):
            static[: len(index)].copy_(torch.from_numpy(index))
            static[len(index) :].fill_(-1)


class LayerSlots(ABC):
    """The sign matrices of one layer in every slot.

    Args:
        sizes: Number of outputs of each of the layer's parts (query, key and value), in order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    @abstractmethod
    def prepare(self, part: int, matrix: SignMatrix) -> object:
        """Convert a part's matrix to the form that ``put`` takes.

        Raises:
            CodecError: For a matrix that the layer cannot hold.
        """

    @abstractmethod
    def put(self, slot: int, parts: Sequence[object | None]) -> None:
        """Replace the contents of a slot; None is a part without a delta."""

    def check(self, part: int, matrix: SignMatrix, cols: int) -> None:
        """Refuse a matrix with a wrong shape.

        Raises:
            CodecError: With both shapes, if they differ.
        """
        if (matrix.rows, matrix.cols) != (self.sizes[part], cols):
            raise CodecError(f"the delta is {[matrix.rows, matrix.cols]}, not {[self.sizes[part], cols]}")


class HostLayer(LayerSlots):
    """``LayerSlots`` on a CPU.

    Args:
        sizes: See ``LayerSlots``.
        cols: Number of inputs.
        num_slots: The number of slots.
        kernel: ``exact``, ``lookup`` or ``lookup16``.
    """

    def __init__(self, sizes: Sequence[int], cols: int, num_slots: int, kernel: str) -> None:
        super().__init__(sizes)
        self._cols, self._num_slots, self._kernel = cols, num_slots, kernel
        self._held: list[dict[int, ResidentSigns]] = [{} for _ in sizes]
        self._batches: list[tuple[SignBatch, IndexArray] | None] = [None for _ in sizes]

    def prepare(self, part: int, matrix: SignMatrix) -> ResidentSigns:
        self.check(part, matrix, self._cols)
        held = ResidentSigns.of(matrix)
        held.check_kernel(self._kernel)
        return held

    def put(self, slot: int, parts: Sequence[object | None]) -> None:
        for number, (held, matrix) in enumerate(zip(self._held, parts, strict=True)):
            held.pop(slot, None)
            if isinstance(matrix, ResidentSigns):
                held[slot] = matrix
            place = np.full(self._num_slots + 1, -1, dtype=np.int64)  # the last entry is for slot -1
            place[list(held)] = np.arange(len(held))
            batch = SignBatch(list(held.values()), self._kernel) if held else None
            self._batches[number] = None if batch is None else (batch, place)

    def add(self, x: Tensor, y: Tensor, index: IndexArray) -> None:
        """Compute ``y[row] += delta[slot of row] @ x[row]`` for rows with a slot.

        Args:
            x: ``[rows, in]``.
            y: ``[rows, out]``, changed in place.
            index: ``[rows] int64``: the slot of each row, or -1.
        """
        path, column = dispatch.path(), 0
        dense: Tensor | None = None
        total = y
        tables: object | None = None
        for size, made in zip(self.sizes, self._batches, strict=True):
            if made is not None:
                batch, place = made
                rows = place[index]
                if (rows >= 0).any():
                    if dense is None:
                        dense = x.detach().to(torch.float32).contiguous()
                        total = y if y.dtype == torch.float32 else torch.zeros(y.shape)
                        tables = batch.tables(dense, None, path)
                    batch.add(dense, rows, total[:, column : column + size], path, tables)
            column += size
        if total is not y:
            y += total.to(y.dtype)

    def add_rows(self, ids: Tensor, y: Tensor, index: IndexArray) -> None:
        """Compute ``y[row] += delta[slot of row][ids[row]]``, the rows of an embedding."""
        made = self._batches[0]
        if made is None:
            return
        batch, place = made
        total = y if y.dtype == torch.float32 else torch.zeros(y.shape)
        batch.add_rows(place[index], ids.to(torch.int64), total)  # vLLM's ids are int32
        if total is not y:
            y += total.to(y.dtype)


class DeviceLayer(LayerSlots):
    """``LayerSlots`` on a GPU: static buffers, and one kernel for all rows and slots.

    Args:
        sizes: See ``LayerSlots``.
        cols: Number of inputs.
        num_slots: The number of slots.
        device: The device of the model.

    Attributes:
        bits: ``[slots, out, ceil(in / 8)] uint8``.
        scales: ``[slots, out] float32``; 0 for a part without a delta.
    """

    def __init__(self, sizes: Sequence[int], cols: int, num_slots: int, device: torch.device) -> None:
        super().__init__(sizes)
        self._cols = cols
        out = sum(sizes)
        self.bits = torch.zeros(num_slots, out, -(-cols // 8), dtype=torch.uint8, device=device)
        self.scales = torch.zeros(num_slots, out, dtype=torch.float32, device=device)

    def prepare(self, part: int, matrix: SignMatrix) -> SignMatrix:
        self.check(part, matrix, self._cols)
        if matrix.scales.numel() not in (1, matrix.rows):
            raise CodecError(
                f"group_size {matrix.group_size}: on a GPU a sign delta has one scale per tensor or per row"
            )
        rows = matrix.scales.reshape(-1).expand(matrix.rows).clone()
        return SignMatrix(matrix.bits.clone(), rows[:, None], matrix.cols, None)

    def put(self, slot: int, parts: Sequence[object | None]) -> None:
        row = 0
        for size, matrix in zip(self.sizes, parts, strict=True):
            if isinstance(matrix, SignMatrix):
                self.bits[slot, row : row + size].copy_(matrix.bits, non_blocking=True)
                self.scales[slot, row : row + size].copy_(matrix.scales[:, 0], non_blocking=True)
            else:
                self.scales[slot, row : row + size].zero_()
            row += size

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        """Compute ``HostLayer.add`` with slots ``[rows] int32`` on the device, without a host round trip."""
        add_signed(x, self.bits, self.scales, slots, y)

    def add_rows(self, ids: Tensor, y: Tensor, slots: Tensor) -> None:
        """Compute ``y[row] += delta[slot of row][ids[row]]`` without a host round trip."""
        safe = slots.clamp(min=0).long()
        bits = self.bits[safe, ids]
        shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=bits.device)
        signs = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : self._cols].to(torch.float32) * 2 - 1
        scale = torch.where(slots >= 0, self.scales[safe, ids], 0.0)
        y += (signs * scale[:, None]).to(y.dtype)


class VectorSlots:
    """A vector per slot in a static buffer, and a neutral one for rows without a slot.

    Args:
        size: Number of elements of a vector.
        num_slots: The number of slots.
        neutral: The value of rows without a slot: 0 for biases, 1 for factors of norms.
        device: The device of the model.
    """

    def __init__(self, size: int, num_slots: int, neutral: float, device: torch.device) -> None:
        self._neutral = neutral
        self.values = torch.full((num_slots + 1, size), neutral, dtype=torch.float32, device=device)
        self.occupied: set[int] = set()

    def put(self, slot: int, values: Tensor | None) -> None:
        """Replace the vector of a slot; None resets it to the neutral one."""
        self.occupied.discard(slot)
        if values is None:
            self.values[slot].fill_(self._neutral)
        else:
            self.values[slot].copy_(values, non_blocking=True)
            self.occupied.add(slot)

    def rows(self, slots: Tensor) -> Tensor:
        """Return the vector of each row, ``[rows, size] float32``; rows of slot -1 get the neutral one, the last."""
        return self.values[slots.long()]


def sliced(matrix: SignMatrix, rows: slice, cols: slice) -> SignMatrix:
    """Return the part of a matrix for one rank of tensor parallelism, as a view where possible.

    Raises:
        CodecError: If the columns do not begin at a whole byte and a whole group.
    """
    if (rows, cols) == (slice(0, matrix.rows), slice(0, matrix.cols)):
        return matrix
    group = matrix.group_size if matrix.group_size is None or matrix.group_size < matrix.cols else None
    last = cols.stop == matrix.cols
    if cols.start % 8 or (group is not None and (cols.start % group or (cols.stop % group and not last))):
        raise CodecError(
            f"columns {cols.start} to {cols.stop} of a rank split a byte, or a group of group_size {group}: change "
            "tensor_parallel_size"
        )
    bits = matrix.bits[rows, cols.start // 8 : -(-cols.stop // 8)]
    scales = matrix.scales if matrix.scales.ndim == 1 else matrix.scales[rows]
    if group is not None:
        scales = scales[:, cols.start // group : -(-cols.stop // group)]
    return SignMatrix(bits.contiguous(), scales.contiguous(), cols.stop - cols.start, group)


_LIBRARY = _library.Library("gym_fed", "DEF")
_LIBRARY.define("add_signed(Tensor x, Tensor bits, Tensor scales, Tensor slots, Tensor(a!) y) -> ()")


def _fake(x: Tensor, bits: Tensor, scales: Tensor, slots: Tensor, y: Tensor) -> None:
    """Do nothing, since the operator returns nothing."""


for _device in ("CUDA", "CPU"):
    _LIBRARY.impl("add_signed", add_signed_slots, _device)
_library.register_fake("gym_fed::add_signed", _fake, lib=_LIBRARY)


def add_signed(x: Tensor, bits: Tensor, scales: Tensor, slots: Tensor, y: Tensor) -> None:
    """Add each row's sign delta: ``y[row] += scales[slot] * sign(bits[slot]) @ x[row]``; slot -1 adds nothing.

    Args:
        x: ``[rows, in]`` float32, bfloat16 or float16.
        bits: ``[slots, out, ceil(in / 8)]`` uint8.
        scales: ``[slots, out]`` float32.
        slots: ``[rows or more]`` int32.
        y: ``[rows, out]``, changed in place; its columns are contiguous.
    """
    torch.ops.gym_fed.add_signed(x, bits, scales, slots, y)
