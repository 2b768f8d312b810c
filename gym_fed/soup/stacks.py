"""One tensor of every update of a round: packed signs, LoRA factors, or blocks decoded on demand.

Any codec is decoded to float32, directly from the mapped files. Memory holds ``BLOCK_ELEMENTS`` decoded numbers of all
updates together, and one update's part of them while it is decoded: neither grows with the tensor or the number of
updates (above 26,214 updates a block still has 40 columns of each). A codec that decodes only entire rows also needs a
row of one update. Merge version 1 needs at least one row of every update.

Products and combinations of LoRA factors use only the factors; the full matrix is formed in blocks, if at all.

Sign deltas are merged on their packed bits, without conversion to floats if the rule allows it: a combination of them
is an integer vote, in which contributor i's bit counts for an integer proportional to its coefficient times its scale
(``gym_fed.soup.signs``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from gym_quant.codec import ALIGNED, VALUES, MergeForm, as_matrix
from gym_quant.kernels import linear_combination, linear_combinations, products, sign_products
from gym_quant.registry import get_codec
from torch import Tensor

from gym_fed.config.hub.soup import MERGE_VERSION
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.manifest import TensorRecord
from gym_fed.soup import low_rank
from gym_fed.soup.aggregator import Aggregator, CoordinateRule
from gym_fed.soup.gram import CombinationWeights
from gym_fed.soup.low_rank import LowRank, combine, frozen_a, powers_of_two, rows_of


class Stack(ABC):
    """One tensor of n updates; an update without it counts as zero.

    Args:
        name: Name of the tensor.
        updates: Open deltas, at least one of which has the tensor.
        shape: Shape of the tensor, treated as ``[rows, cols]``: cols is the last dimension, rows all others.
        version: Merge version (``SoupRecipe.merge_version``).
    """

    def __init__(
        self, name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...], version: int = MERGE_VERSION
    ) -> None:
        self.name = name
        self.updates = updates
        self.shape = shape
        self.version = version
        self.rows, self.cols = as_matrix(shape)

    @abstractmethod
    def products(self, factors: Tensor) -> Tensor:
        """Return the ``[n, n]`` float64 inner products of the updates' tensors.

        Args:
            factors: ``[n]`` float64 powers of two near the inverse of each update's norm. The updates are multiplied by
                them, so that a malicious update cannot overflow.
        """

    @abstractmethod
    def merge(self, plan: CombinationWeights, rule: Aggregator, target: Tensor) -> None:
        """Fill ``target`` ``[rows, cols]`` float32 with ``rule.combine`` of the combined updates of ``plan``."""

    def release(self) -> None:
        """Release the mapped pages of the tensor; they are read again when needed."""
        for update in self.updates:
            if self.name in update:
                update.release(self.name)


BLOCK_ELEMENTS = 1 << 20
"""Maximum decoded numbers in memory, of all updates together."""

Place = tuple[slice, slice]
"""Rows and columns."""


class DecodedStack(Stack):
    def products(self, factors: Tensor) -> Tensor:
        total = torch.zeros(len(self.updates), len(self.updates), dtype=torch.float64)
        plain = bool((factors == 1.0).all())
        for _, block in self._blocks():
            products(block if plain else _scaled(block, factors), out=total)
        return total

    def merge(self, plan: CombinationWeights, rule: Aggregator, target: Tensor) -> None:
        for place, block in self._blocks():
            part = target[place]
            part.copy_(rule.combine(mixed(block, plan.matrix), plan.weights).reshape(part.shape))

    def _blocks(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield row offsets with ``[n, rows * cols]`` float32 blocks; the buffer is reused."""
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
        """Return the number of columns of a block: all of them if one row of every update fits."""
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
    """Compute ``matrix @ block``, ``[m, n]`` float64 by ``[n, k]`` float32, as ``[m, k]``; free for an identity."""
    if len(matrix) == 1:
        return linear_combination(block, matrix[0])[None]
    diagonal = matrix.diagonal()
    if matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, torch.diag(diagonal)):
        return block if bool((diagonal == 1.0).all()) else _scaled(block, diagonal)
    return linear_combinations(block, matrix)


def _scaled(block: Tensor, factors: Tensor) -> Tensor:
    return (block.to(torch.float64) * factors[:, None]).to(torch.float32)


class FactorStack(Stack):
    """Updates stored as factors (``Codec.factors``), of any ranks."""

    @cached_property
    def factors(self) -> list[LowRank | None]:
        """The factors of every update in float64, None for one without the tensor; cached until ``release``.

        Memory use is eight bytes per number, for the factors of this tensor of all updates.
        """
        return [
            LowRank.of(update.payload(self.name), update.record(self.name)) if self.name in update else None
            for update in self.updates
        ]

    def release(self) -> None:
        self.__dict__.pop("factors", None)
        super().release()

    def products(self, factors: Tensor) -> Tensor:
        """Return the inner products.

        The factors are scaled first, since products of numbers far below 2**-480 would lose bits.
        """
        scaled = [
            None if update is None else LowRank(update.a, update.b * factor)
            for update, factor in zip(self.factors, factors.tolist(), strict=True)
        ]
        return low_rank.products(scaled)

    def merged(self, plan: CombinationWeights, rule: Aggregator) -> LowRank | None:
        """Merge into factors; None for a coordinate-wise rule on updates with different A.

        Factors are stacked if the rule weights whole updates, or one A with a merged B if all updates share A.
        """
        if len(plan.matrix) == 1 and not isinstance(rule, CoordinateRule):
            return combine(self.factors, plan.matrix[0])
        shared = frozen_a(self.factors)
        return None if shared is None else LowRank(shared, self._merge_b(plan, rule, shared))

    def merge(self, plan: CombinationWeights, rule: Aggregator, target: Tensor) -> None:
        factors = self.merged(plan, rule)
        if factors is None:
            DecodedStack(self.name, self.updates, self.shape, self.version).merge(plan, rule, target)
            return
        step = max(1, BLOCK_ELEMENTS // self.cols)
        for start in range(0, self.rows, step):
            stop = min(self.rows, start + step)
            target[start:stop] = rows_of(factors, start, stop)

    def _merge_b(self, plan: CombinationWeights, rule: Aggregator, shared: Tensor) -> Tensor:
        """Merge the B of updates that all trained the same A, as a small tensor.

        B is scaled to the unit of the product (its components times powers of two of A's), which fits in float32, while
        a B with a small A may overflow. A coordinate-wise rule does not depend on the unit.
        """
        rank = len(shared)
        none = torch.zeros(self.rows, rank, dtype=torch.float64)
        units = powers_of_two(shared)
        block = torch.stack(
            [none.reshape(-1) if f is None else (f.b * units).reshape(-1) for f in self.factors]
        )
        rows = _mixed(block, plan).to(torch.float32)
        return rule.combine(rows, plan.weights).reshape(self.rows, rank).to(torch.float64) / units


def _mixed(block: Tensor, plan: CombinationWeights) -> Tensor:
    """Combine ``[n, d]`` float64 vectors, in float64."""
    diagonal = plan.matrix.diagonal()
    if plan.matrix.shape[0] == plan.matrix.shape[1] and torch.equal(plan.matrix, torch.diag(diagonal)):
        return block * diagonal[:, None]
    return plan.applied(block)


class SignStack(Stack):
    """Updates stored as signs and scales (``Codec.signs``), in any codecs with the same group size."""

    @cached_property
    def group_size(self) -> int | None:
        """Columns per scale; None for one scale per tensor."""
        record = next(update.record(self.name) for update in self.updates if self.name in update)
        return get_codec(record.codec).merge_form(record.shape, record.params).group_size

    @cached_property
    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Bits and float32 scales of every update: views of the files, or zeros if an update lacks the tensor."""
        parts = [_signs(update, self.name) if self.name in update else None for update in self.updates]
        like = next(part for part in parts if part is not None)
        nothing = (torch.zeros_like(like[0]), torch.zeros_like(like[1])) if None in parts else like
        full = [nothing if part is None else part for part in parts]
        return [bits for bits, _ in full], [scales for _, scales in full]

    @property
    def bits(self) -> list[Tensor]:
        return self._parts[0]

    @property
    def scales(self) -> list[Tensor]:
        return self._parts[1]

    def release(self) -> None:
        self.__dict__.pop("_parts", None)  # 18 KB per update: 800 MB for 46 tensors of 900 updates
        super().release()

    def products(self, factors: Tensor) -> Tensor:
        products = sign_products(self.bits, self.scales, self.cols, self.group_size)
        if bool((factors == 1.0).all()):  # the usual case; with a thousand updates each of these takes 8 MB
            return products
        return products * factors[:, None] * factors[None]

    def merge(self, plan: CombinationWeights, rule: Aggregator, target: Tensor) -> None:
        if self.group_size is None:
            strengths = plan.matrix * torch.cat(self.scales).to(torch.float64)
            if rule.combine_signs(self.bits, strengths, plan.weights, target):
                return
        DecodedStack(self.name, self.updates, self.shape, self.version).merge(plan, rule, target)


def _signs(update: DeltaFile, name: str) -> tuple[Tensor, Tensor]:
    record = update.record(name)
    signs = get_codec(record.codec).signs(update.payload(name), record.shape, record.params)
    if signs is None:
        raise TypeError(f"codec {record.codec!r} declares that it merges as signs, but returns none")
    return signs.bits, signs.scales


_STACKS: dict[str, type[SignStack] | type[FactorStack] | type[DecodedStack]] = {
    "signs": SignStack,
    "factors": FactorStack,
    "values": DecodedStack,
}


def form_of(record: TensorRecord, version: int = MERGE_VERSION) -> MergeForm:
    """Return the form in which a merge reads a tensor, given its codec."""
    form = get_codec(record.codec).merge_form(record.shape, record.params)
    return form if form.since <= version else VALUES


def stack_of(
    name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...], version: int = MERGE_VERSION
) -> Stack:
    """Stack one tensor of all updates, in their common form if they have one, else decoded."""
    forms = {form_of(update.record(name), version) for update in updates if name in update}
    form = forms.pop() if len(forms) == 1 else VALUES
    return _STACKS[form.kind](name, updates, shape, version)


def stacks_of(updates: Sequence[DeltaFile], spec: BaseSpec, version: int = MERGE_VERSION) -> list[Stack]:
    """Stack every tensor of the base that any update holds, by name."""
    held = {name for update in updates for name in update.names}
    return [stack_of(name, updates, tuple(spec.shapes[name]), version) for name in sorted(held)]
