"""Merge updates with differential privacy: clip, discretise, sum, add noise.

Adjacency is zero-out (Kairouz et al. 2021, arXiv:2103.00039, definition 1.1): a neighbour of a round is the same round
in which one update counts as zero: every value is zero in the sum, and the update is counted neither within nor
above the norm (an update of zeros would count as within). The number of updates, n, is public. The query on n integer
vectors x_i is, coordinate by coordinate, the sum of the middle n - 2t values:

* ``mean``: t = 0, the sum; without contributor i it changes by x_i.
* ``trimmed_mean``: t values dropped at either end. Moving one of n numbers from x_ij to 0 moves all order statistics in
the same direction, by |x_ij| in total, so the sum of any of them changes by at most |x_ij|.
* ``median``: the one or two values in the middle, t = (n - 1) // 2; the same argument.
* ``root_gate``: t = 0. x_i is zero if update i points away from the coordinator's own (root) update; otherwise its
  length is that of the root update, or the clip if that is less. Each x_i depends on update i and the root update only.
  The root update depends on contributors only through earlier soups, which are public, so the noise may depend on its
  length.

In every case coordinate j changes by at most |x_ij|, so the change of the vector has at most the L2 norm of x_i: the
clip. The query is divided by n - 2t (public) after the noise. ``discrete_gaussian`` sums votes in {-1, 0, 1} of d
coordinates, whose norm is at most sqrt(d); scales are ignored.

All tensors that an update may contain get noise, whether or not a contributor sent them. All later steps are
post-processing: the server optimiser, the learning rate, the soup's codec, its error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from gym_quant.codec import sum_of_squares
from numpy.typing import NDArray
from torch import Tensor

from gym_fed.config.hub.privacy import AdaptiveClipping, ReleasePrivacy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.privacy.clipping import (
    UNITS,
    Floats,
    Integers,
    Ruler,
    next_norm,
    noise_left,
    on_lattice,
    scale_factors,
    whole_norm,
)
from gym_fed.privacy.noise import NoiseSource
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.gram import CombinationWeights
from gym_fed.soup.low_rank import LowRank
from gym_fed.soup.stacks import BLOCK_ELEMENTS, DecodedStack, FactorStack, Stack, form_of

FrozenA = Callable[[str, int], Tensor]
"""A function from a weight's name and column count to the A ``[r, cols]`` that all contributors of a round share, as
stored."""

Draw = Callable[[int], Integers]
"""A function that returns the next N integers of one tensor's noise."""


@dataclass(frozen=True)
class PrivateMerge:
    """The privacy settings of a merge.

    Attributes:
        privacy: Mechanism, noise and clip; ``clipping_norm`` is that of this round.
        seed: The noise seed: 32 unpredictable bytes, never reused for a different list of updates.
        tensors: Names of the tensors that an update may contain, from the task and not from the updates.
        frozen_a: For LoRA with a frozen A, whose query is on B; None for full deltas.
        adaptive: Settings to compute the clipping norm of the next round; None for a fixed norm.
    """

    privacy: ReleasePrivacy
    seed: bytes
    tensors: Sequence[str]
    frozen_a: FrozenA | None = None
    adaptive: AdaptiveClipping | None = None


@dataclass(frozen=True)
class RootGateView:
    """A round's updates, each compared with the coordinator's own (root) update separately.

    Attributes:
        admitted: For each update, True if its inner product with the root update is positive.
        root: The root update.
    """

    admitted: Sequence[bool]
    root: DeltaFile


@dataclass(frozen=True)
class PrivateReport:
    """The report of a private merge; it depends on the updates only through the noised sum.

    Attributes:
        coordinates: Number of coordinates with noise, d.
        next_clipping_norm: Clipping norm of the next round.
    """

    coordinates: int
    next_clipping_norm: float


class Query:
    """An integer query: maps a block of all updates to integers, and noised integers to the soup's values."""

    def __init__(self, private: PrivateMerge) -> None:
        self._seed = private.seed

    def begin(self, name: str) -> Draw:
        """Start the noise of a tensor at its first coordinate; deterministic per tensor."""
        raise NotImplementedError

    def exact(self, name: str, block: NDArray[np.floating]) -> Integers:
        """Sum ``[n, k]`` values of the updates to ``[k]`` int64. The exact sum must stay inside this module."""
        raise NotImplementedError

    def value(self, noised: Integers) -> Floats:
        """Convert ``[k]`` noised integers to the aggregate's values, float64."""
        raise NotImplementedError

    def release(self, name: str, block: NDArray[np.floating], draw: Draw) -> Floats:
        """Convert ``[n, k]`` values to ``[k]`` noised ones, float64."""
        exact = self.exact(name, block)
        return self.value(exact + draw(len(exact)))


class ClippedMiddle(Query):
    """The sum of the middle values of every coordinate with rounded Gaussian noise.

    An integer plus a rounded Gaussian is the integer plus the Gaussian, rounded: post-processing of the Gaussian
    mechanism.
    """

    def __init__(
        self, private: PrivateMerge, factors: Mapping[str, Floats], updates: int, aggregator: Aggregator
    ) -> None:
        super().__init__(private)
        self._factors = factors
        dropped = _dropped(aggregator, updates)
        self._middle = slice(dropped, updates - dropped)
        self._divisor = updates - 2 * dropped
        self._std = UNITS * noise_left(private.privacy.noise_multiplier, private.adaptive)
        self._step = private.privacy.clipping_norm / UNITS
        self.ruler = Ruler(updates)

    def begin(self, name: str) -> Draw:
        self.ruler.begin(name)
        source = NoiseSource(self._seed)
        return lambda count: source.rounded_gaussian(self._std, count, f"tensor/{name}")

    def exact(self, name: str, block: NDArray[np.floating]) -> Integers:
        integers = on_lattice(block, self._factors[name])
        self.ruler.add(name, integers)
        if self._middle != slice(0, len(integers)):
            integers = np.sort(integers, axis=0)[self._middle]
        total: Integers = integers.sum(axis=0)
        return total

    def value(self, noised: Integers) -> Floats:
        return noised.astype(np.float64) * (self._step / self._divisor)


class SignVotes(Query):
    """The sum of votes (plus minus minus) with discrete Gaussian noise.

    Every vote vector has at most the norm ``sqrt(d)``, which is used as the clipping norm.
    """

    def __init__(self, private: PrivateMerge, updates: int, coordinates: int, aggregator: Aggregator) -> None:
        super().__init__(private)
        self._variance = math.ceil(private.privacy.noise_multiplier**2 * coordinates)
        self._vote = private.privacy.clipping_norm / math.sqrt(coordinates)
        self._updates, self._aggregator = updates, aggregator

    def begin(self, name: str) -> Draw:
        source = NoiseSource(self._seed)
        return lambda count: source.discrete_gaussian(self._variance, count, f"tensor/{name}")

    def exact(self, name: str, block: NDArray[np.floating]) -> Integers:
        signs = np.sign(block)
        signs[np.isnan(signs)] = 0  # overflowed values cast no vote
        total: Integers = signs.astype(np.int64).sum(axis=0)
        return total

    def value(self, noised: Integers) -> Floats:
        return self._aggregator.of_votes(noised, self._updates, self._vote, noised=True)


class NoisedStack(DecodedStack):
    """A tensor of full deltas in any codecs; an update without it counts as zero."""

    query: Query
    """The private query; set after the norms are known."""

    def merge(self, plan: CombinationWeights, rule: Aggregator, target: Tensor) -> None:
        """Fill ``target`` by the private query; ``plan`` and ``rule`` are ignored."""
        draw = self.query.begin(self.name)
        for place, block in self._blocks():
            values = self.query.release(self.name, block.numpy(), draw)
            target[place] = torch.from_numpy(values).to(torch.float32).reshape(target[place].shape)

    def update_norm(self, update: DeltaFile) -> float:
        """Return the L2 norm of a decoded update; for factors, from their product's elements, not Gram matrices."""
        if self.name not in update:
            return 0.0
        if form_of(update.record(self.name)).kind != "factors":
            return update.tensor_norm(self.name)
        step = max(1, BLOCK_ELEMENTS // self.cols)
        starts = range(0, self.rows, step)
        squares = [
            sum_of_squares(update.decode_rows(self.name, start, min(self.rows, start + step)))
            for start in starts
        ]
        return math.sqrt(math.fsum(squares))

    def root_norm(self, root: DeltaFile) -> float:
        """Return the L2 norm of the coordinator's own update."""
        return self.update_norm(root)


class NoisedFactors(FactorStack):
    """The B of a LoRA tensor whose A the round's task names (FFA-LoRA, Sun et al. 2024, arXiv:2403.12313).

    With noise on both factors, the product would also contain noise times noise and noise times the factors. Here A is
    public, and the product with it is post-processing.
    """

    query: Query
    """The private query; set after the norms are known."""

    def __init__(
        self, name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...], frozen_a: FrozenA
    ) -> None:
        super().__init__(name, updates, shape)
        self._frozen_a = frozen_a

    @cached_property
    def shared(self) -> Tensor:
        """The public A, ``[r, cols]`` float64."""
        return self._frozen_a(self.name, self.cols).to(torch.float64)

    def b_of(self, update: DeltaFile) -> Tensor | None:
        """Return the update's B ``[rows, r]`` float64 including the scaling; None if the update lacks the tensor.

        Raises:
            GymError: ``UPDATE_REFUSED`` if its A differs from the task's.
        """
        if self.name not in update:
            return None
        record = update.record(self.name)
        is_factors = form_of(record).kind == "factors"
        factors = LowRank.of(update.payload(self.name), record) if is_factors else None
        if factors is None or not torch.equal(factors.a, self.shared):
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"tensor {self.name!r} of an update has an A that differs from the round's",
                "train with recipe.lora.freeze_a, as the task requires",
            )
        return factors.b

    def update_norm(self, update: DeltaFile) -> float:
        """Return the L2 norm of an update's B."""
        b = self.b_of(update)
        return 0.0 if b is None else math.sqrt(sum_of_squares(b))

    def root_norm(self, root: DeltaFile) -> float:
        """Return the L2 norm of the B of the coordinator's own update, whose A may be stored in a different dtype."""
        if self.name not in root:
            return 0.0
        factors = LowRank.of(root.payload(self.name), root.record(self.name))
        return math.sqrt(sum_of_squares(factors.b))

    def merged(self, plan: CombinationWeights, rule: Aggregator) -> LowRank:
        draw = self.query.begin(self.name)
        rank, count = len(self.shared), len(self.updates)
        merged_b = torch.empty(self.rows, rank, dtype=torch.float64)
        factors = [self.b_of(update) for update in self.updates]
        step = max(1, BLOCK_ELEMENTS // (rank * count))
        for start in range(0, self.rows, step):
            stop = min(self.rows, start + step)
            block = np.zeros((count, (stop - start) * rank))
            for row, b in zip(block, factors, strict=True):
                if b is not None:
                    row[:] = b[start:stop].reshape(-1).numpy()
            values = self.query.release(self.name, block, draw)
            merged_b[start:stop] = torch.from_numpy(values).reshape(stop - start, rank)
        return LowRank(self.shared, merged_b)


def private_stacks(
    updates: Sequence[DeltaFile],
    spec: BaseSpec,
    aggregator: Aggregator,
    private: PrivateMerge,
    gate: RootGateView | None = None,
) -> tuple[list[Stack], PrivateReport]:
    """Return a stack for every tensor that an update may contain, with the clipping factors for a private merge.

    Args:
        updates: Open deltas of ``spec``.
        spec: The base.
        aggregator: A rule that the mechanism supports.
        private: The settings.
        gate: The updates that count, for a rule that compares each with the root update only; None for other rules.

    Raises:
        GymError: ``UPDATE_REFUSED`` for an update with a tensor that the task does not train.
    """
    _refuse_foreign(updates, private.tensors)
    made: list[NoisedStack | NoisedFactors] = []
    for name in sorted(private.tensors):
        shape = tuple(spec.shapes[name])
        if private.frozen_a is None:
            made.append(NoisedStack(name, updates, shape))
        else:
            made.append(NoisedFactors(name, updates, shape, private.frozen_a))
    coordinates = sum(
        stack.rows * (len(stack.shared) if isinstance(stack, NoisedFactors) else stack.cols) for stack in made
    )
    clipping_norm = private.privacy.clipping_norm
    if gate is not None and (root_norm := whole_norm([stack.root_norm(gate.root) for stack in made])) > 0.0:
        # The root update's norm depends on no contributor, so clip and noise may depend on it.
        length = min(clipping_norm, root_norm)
        private = replace(private, privacy=private.privacy.model_copy(update={"clipping_norm": length}))
    query: Query
    if private.privacy.mechanism == "discrete_gaussian":
        query = SignVotes(private, len(updates), coordinates, aggregator)
    else:
        norms = [[stack.update_norm(update) for stack in made] for update in updates]
        per_layer = private.privacy.clipping == "per_layer"
        factors = scale_factors(norms, private.privacy.clipping_norm, per_layer, lengthen=gate is not None)
        if gate is not None:
            factors *= np.array(gate.admitted, dtype=np.float64)[:, None]
        by_name = {stack.name: factors[:, at] for at, stack in enumerate(made)}
        query = ClippedMiddle(private, by_name, len(updates), aggregator)
        if private.adaptive is not None:
            within = sum(whole_norm(row) <= clipping_norm for row in norms)
            source = NoiseSource(private.seed)
            clipping_norm = next_norm(clipping_norm, within, len(updates), private.adaptive, source)
    for stack in made:
        stack.query = query
    return list(made), PrivateReport(coordinates, clipping_norm)


def _dropped(aggregator: Aggregator, updates: int) -> int:
    dropped = aggregator.drops(torch.ones(updates, dtype=torch.float64))
    assert dropped is not None, f"aggregator {aggregator.name!r} has bounds_one, but drops returns no number"
    return dropped


def _refuse_foreign(updates: Sequence[DeltaFile], tensors: Sequence[str]) -> None:
    known = set(tensors)
    for update in updates:
        for name in update.names:
            if name not in known:
                raise GymError(
                    ErrorCode.UPDATE_REFUSED, f"tensor {name!r} of an update is not one that the task trains"
                )
