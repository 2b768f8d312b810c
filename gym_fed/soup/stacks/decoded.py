"""Any codecs, decoded to float32 a block at a time, straight from the mapped files.

What is held are ``BLOCK_ELEMENTS`` decoded numbers, of all updates together, and one update's part of them while it is
decoded: neither grows with the tensor or with the number of updates (above 26,214 updates a block still has 40 columns
of each). A codec that decodes whole rows only holds a row of one update besides. Merging of version 1 held at least
one row of every update.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gym_quant.codec import ALIGNED
from gym_quant.kernels import linear_combination, linear_combinations, products
from torch import Tensor

from gym_fed.delta.file import DeltaFile
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.stacks.base import Stack

BLOCK_ELEMENTS = 1 << 20
"""Decoded numbers held at a time, of all updates together."""

Place = tuple[slice, slice]
"""Rows and columns."""


class DecodedStack(Stack):
    def products(self, factors: Tensor) -> Tensor:
        total = torch.zeros(len(self.updates), len(self.updates), dtype=torch.float64)
        plain = bool((factors == 1.0).all())
        for _, block in self._blocks():
            products(block if plain else _scaled(block, factors), out=total)
        return total

    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        for place, block in self._blocks():
            part = target[place]
            part.copy_(rule.combine(mixed(block, plan.matrix), plan.weights).reshape(part.shape))

    def _blocks(self) -> Iterator[tuple[Place, Tensor]]:
        """Places, row after row, and ``[n, rows * cols] float32`` of them; the block is reused."""
        count = len(self.updates)
        width = self._width(count)
        step = min(self.rows, max(1, BLOCK_ELEMENTS // (width * count)))
        whole = torch.zeros(count, step * width)
        for start in range(0, self.rows, step):
            for first in range(0, self.cols, width):
                rows, cols = _slice(start, step, self.rows), _slice(first, width, self.cols)
                size = (rows.stop - rows.start) * (cols.stop - cols.start)
                block = whole if size == whole.shape[1] else torch.zeros(count, size)
                for row, update in zip(block, self.updates, strict=True):
                    if self.name in update:
                        row.copy_(self._decoded(update, rows, cols).reshape(-1))
                yield (rows, cols), block

    def _width(self, count: int) -> int:
        """Columns of a block: all of them where a row of every update fits."""
        if self.version == 1 or self.cols * count <= BLOCK_ELEMENTS:
            return self.cols
        return min(self.cols, max(ALIGNED, BLOCK_ELEMENTS // count // ALIGNED * ALIGNED))

    def _decoded(self, update: DeltaFile, rows: slice, cols: slice) -> Tensor:
        if cols.stop - cols.start == self.cols:
            return update.decode_rows(self.name, rows.start, rows.stop)
        return update.decode_block(self.name, rows, cols)


def _slice(start: int, step: int, end: int) -> slice:
    return slice(start, min(end, start + step))


def mixed(block: Tensor, matrix: Tensor) -> Tensor:
    """``matrix @ block``: ``[m, n]`` float64, ``[n, k]`` float32 to ``[m, k]`` float32; an identity costs nothing."""
    if len(matrix) == 1:
        return linear_combination(block, matrix[0])[None]
    diagonal = matrix.diagonal()
    if matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, torch.diag(diagonal)):
        return block if bool((diagonal == 1.0).all()) else _scaled(block, diagonal)
    return linear_combinations(block, matrix)


def _scaled(block: Tensor, factors: Tensor) -> Tensor:
    return (block.to(torch.float64) * factors[:, None]).to(torch.float32)
