"""The variants in vLLM's slots, layer by layer, and the terms that they add to a step.

A slot is a place for one active variant (``--max-loras``). ``StepSlots`` says which slot each row of a step uses.
On a CPU a slot refers to the variant's resident matrices. On CUDA every layer has static buffers for all slots, which
CUDA graphs require: activation copies a variant into them, and the kernel reads the rows' slots on the device.
No vllm here: tests run without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from gym_quant import CodecError
from gym_quant.kernels import SignMatrix, dispatch
from gym_quant.kernels.resident import ResidentSigns, SignBatch
from gym_quant.resident import IndexArray
from torch import Tensor

from gym_fed.serving.vllm_plugin import ops

_SHIFTS = tuple(range(8))


class StepSlots:
    """The slot of every row of the current step; -1: no variant of this plug-in.

    Args:
        size: Maximum rows of a step.
        device: The device of the model.

    Attributes:
        tokens: ``[size] int32``: of each token. Static, because CUDA graphs read it; rows beyond the step are -1.
        samplers: ``[size] int32``: of each row of logits.
        token_index: The same as ``tokens``, ``[rows] int64`` on the host, for CPU kernels.
        sampler_index: The same as ``samplers``.
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
        sizes: Outputs of the layer's parts (query, key and value), side by side.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    @abstractmethod
    def prepare(self, part: int, matrix: SignMatrix) -> object:
        """Copy a part's matrix into the form that ``put`` takes.

        Raises:
            CodecError: For a matrix that the layer cannot hold.
        """

    @abstractmethod
    def put(self, slot: int, parts: Sequence[object | None]) -> None:
        """Replace the contents of a slot; a part that is None has no delta."""

    def check(self, part: int, matrix: SignMatrix, cols: int) -> None:
        """Refuse a matrix of another shape.

        Raises:
            CodecError: Naming both shapes.
        """
        if (matrix.rows, matrix.cols) != (self.sizes[part], cols):
            raise CodecError(f"the delta is {[matrix.rows, matrix.cols]}, not {[self.sizes[part], cols]}")


class HostLayer(LayerSlots):
    """``LayerSlots`` on a CPU.

    Args:
        sizes: As in ``LayerSlots``.
        cols: Inputs.
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
            place = np.full(self._num_slots + 1, -1, dtype=np.int64)  # its last entry is that of slot -1
            place[list(held)] = np.arange(len(held))
            batch = SignBatch(list(held.values()), self._kernel) if held else None
            self._batches[number] = None if batch is None else (batch, place)

    def add(self, x: Tensor, y: Tensor, index: IndexArray) -> None:
        """``y[row] += delta[slot of row] @ x[row]`` for rows with a slot.

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
        """``y[row] += delta[slot of row][ids[row]]``: the rows of an embedding."""
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
        sizes: As in ``LayerSlots``.
        cols: Inputs.
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
        ops.add_signed(x, self.bits, self.scales, slots, y)

    def add_rows(self, ids: Tensor, y: Tensor, slots: Tensor) -> None:
        """``y[row] += delta[slot of row][ids[row]]``: the rows of an embedding, without a host round trip."""
        safe = slots.clamp(min=0).long()
        bits = self.bits[safe, ids]
        shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=bits.device)
        signs = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : self._cols].to(torch.float32) * 2 - 1
        scale = torch.where(slots >= 0, self.scales[safe, ids], 0.0)
        y += (signs * scale[:, None]).to(y.dtype)


class VectorSlots:
    """A vector per slot in a static buffer, and a neutral one for rows without a slot.

    Args:
        size: Elements of the vector.
        num_slots: The number of slots.
        neutral: The value of rows without a slot: 0 for biases, 1 for factors of norms.
        device: The device of the model.
    """

    def __init__(self, size: int, num_slots: int, neutral: float, device: torch.device) -> None:
        self._neutral = neutral
        self.values = torch.full((num_slots + 1, size), neutral, dtype=torch.float32, device=device)
        self.occupied: set[int] = set()

    def put(self, slot: int, values: Tensor | None) -> None:
        """Replace the vector of a slot; None: the neutral one."""
        self.occupied.discard(slot)
        if values is None:
            self.values[slot].fill_(self._neutral)
        else:
            self.values[slot].copy_(values, non_blocking=True)
            self.occupied.add(slot)

    def rows(self, slots: Tensor) -> Tensor:
        """Return the vector of each row, ``[rows, size] float32``; the last is the neutral one, of slot -1."""
        return self.values[slots.long()]


def sliced(matrix: SignMatrix, rows: slice, cols: slice) -> SignMatrix:
    """Return the part of a matrix that one rank of tensor parallelism holds; a view where possible.

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
