"""Any codecs, decoded to float32 a block of rows at a time: memory does not grow with the number of updates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gym_quant.kernels import linear_combination, linear_combinations, products
from torch import Tensor

from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.stacks.base import Stack

BLOCK_ELEMENTS = 1 << 20
"""Decoded numbers held at a time, of all updates together (but at least one row of each)."""


class DecodedStack(Stack):
    def products(self, factors: Tensor) -> Tensor:
        total = torch.zeros(len(self.updates), len(self.updates), dtype=torch.float64)
        plain = bool((factors == 1.0).all())
        for _, _, block in self._blocks():
            products(block if plain else _scaled(block, factors), out=total)
        return total

    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        for start, stop, block in self._blocks():
            rows = mixed(block, plan.matrix)
            target[start:stop] = rule.combine(rows, plan.weights).reshape(stop - start, self.cols)

    def _blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """``(start, stop, [n, (stop - start) * cols] float32)``; the block is reused."""
        count = len(self.updates)
        step = min(self.rows, max(1, BLOCK_ELEMENTS // (self.cols * count)))
        whole = torch.zeros(count, step * self.cols)
        for start in range(0, self.rows, step):
            stop = min(self.rows, start + step)
            block = whole if stop - start == step else torch.zeros(count, (stop - start) * self.cols)
            for row, update in zip(block, self.updates, strict=True):
                if self.name in update:
                    row.copy_(update.decode_rows(self.name, start, stop).reshape(-1))
            yield start, stop, block


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
