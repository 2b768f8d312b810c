"""The interface of aggregators: coordinate-wise rules, and rules that weight whole updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.core.text import counted
from gym_fed.soup import signs
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.rule import Rule
from gym_fed.soup.rule import RuleConfig as AggregatorConfig

if TYPE_CHECKING:
    from torch import Tensor


Integers: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"

__all__ = ["Aggregator", "AggregatorConfig", "CoordinateRule", "WeightRule"]


class Aggregator(Rule):
    """An aggregation rule. ``mix`` reads inner products of the updates, ``combine`` their coordinates in blocks.

    Derive from ``WeightRule`` or ``CoordinateRule``. To add a rule, put a file with a subclass into
    ``gym_fed/soup/aggregators``, named like the rule.
    """

    robust: ClassVar[bool]
    """True if the result stays near the honest updates when f clients are malicious."""

    coordinate_wise: ClassVar[bool] = False
    """True if the rule decides every coordinate separately (``CoordinateRule``), so that coordinates that most updates
    leave out become zero."""

    weighted: ClassVar[bool] = False
    """True if the rule is defined for updates of unequal weight."""

    majority: ClassVar[bool] = False
    """True if the rule tolerates malicious clients with less than half of the weight. ``check`` then refuses rounds in
    which the f heaviest updates hold half of it."""

    bounds_one: ClassVar[bool] = False
    """True if one contributor's clipped update changes the result by a known bound: the rule drops a fixed number of
    values of each coordinate on either side (``drops``) and averages the others. The ``gaussian`` mechanism of
    differential privacy requires such a rule."""

    counts_votes: ClassVar[bool] = False
    """True if the result on signs depends on the sum of votes only (``of_votes``). Secure aggregation and the
    ``discrete_gaussian`` mechanism require such a rule."""

    @classmethod
    def default_malicious(cls, contributors: int) -> int:
        """Return the default number of malicious clients to tolerate, given the number of contributors."""
        return 0

    @classmethod
    def minimum(cls, malicious: int) -> int:
        """Return the minimum number of updates to tolerate f = ``malicious`` clients, from the rule's paper."""
        return 2 * malicious + 1

    @classmethod
    def weighs_windows(cls) -> bool:
        """True if the rule works in continuous rounds, where it weighs more updates than are added: it gives each whole
        update a coefficient, using only inner products."""
        return False

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        """Return the linear combinations of the updates that ``combine`` merges; by default the updates themselves."""
        return CombinationWeights.identity(gram.weights)

    @abstractmethod
    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Aggregate a block: ``[m, block]`` float32 vectors and ``[m]`` float64 weights to ``[block]`` float32.

        Must not change its input or depend on the number of torch threads.
        """

    def claims(self, gram: GramMatrix) -> tuple[Tensor, Tensor]:
        """Return soup_0 and each update's additional claim; only for rules with ``Needs.EVIDENCE``.

        The verdict on an update (``RowEvidence.verdicts``) is whether its claim, added to soup_0, lowers the loss on
        the coordinator's clean rows.

        Returns:
            ``[n]`` float64 coefficients of soup_0, and ``[n]`` float64 further coefficients, 0 for no claim.
        """
        raise NotImplementedError(f"aggregator {self.name!r} uses no verdicts on updates")

    def drops(self, weights: Tensor) -> int | None:
        """Return the number of values dropped on each side of a coordinate; None if the rule is not a trimmed mean."""
        return None

    def of_votes(self, totals: Integers, voters: int, vote: float, *, noised: bool) -> Floats:
        """Compute the result from the sum of votes; only for rules with ``counts_votes``.

        Args:
            totals: ``[k]`` int64 sums of votes in {-1, 0, 1}.
            voters: Number of voters.
            vote: Change of a model weight by one vote.
            noised: True if ``totals`` contains noise.

        Returns:
            ``[k]`` float64.
        """
        raise NotImplementedError(f"aggregator {self.name!r} is not a function of the sum of votes")

    def combine_signs(self, bits: Sequence[Tensor], strengths: Tensor, weights: Tensor, out: Tensor) -> bool:
        """Run ``combine`` on packed signs, without decoding them.

        Args:
            bits: n packed matrices of one shape.
            strengths: ``[m, n]`` float64; combined vector k is ``sum_i strengths[k, i] * sign_i``.
            weights: ``[m]`` float64.
            out: ``[rows, cols]`` float32, filled with the result.

        Returns:
            False if the rule cannot do this; ``out`` is then unchanged.
        """
        return False

    def aggregate(self, updates: Tensor, weights: Tensor, root: Tensor | None = None) -> Tensor:
        """Merge updates in memory.

        Args:
            updates: ``[n, d]`` float32, a row for each contributor.
            weights: ``[n]`` float32, positive; only their ratios matter.
            root: ``[d]`` float32, the coordinator's own update, for rules that need one.

        Returns:
            ``[d]`` float32.

        Raises:
            GymError: ``UPDATE_REFUSED`` for values that are not finite in float32, ``USAGE`` for wrong shapes or
                weights, and the errors from ``check``.
        """
        if updates.dim() != 2 or weights.shape != updates.shape[:1]:
            raise GymError(
                ErrorCode.USAGE,
                f"updates {list(updates.shape)} and weights {list(weights.shape)} do not match",
            )
        self.check(weights)
        if self.needs is not Needs.EVIDENCE and (root is not None) != (self.needs is Needs.ROOT):
            raise GymError(
                ErrorCode.USAGE,
                f"aggregator {self.name!r} {'needs' if root is None else 'takes no'} root update",
            )
        rows = updates.to(torch.float32)
        finite = torch.isfinite(rows).all(dim=1)
        if not bool(finite.all()):
            culprit = int((~finite).nonzero()[0, 0])
            raise GymError(
                ErrorCode.UPDATE_REFUSED, f"update {culprit} has values that are not finite in float32"
            )
        exact = weights.to(torch.float64)
        if self.needs is Needs.NOTHING:
            combination = self.mix(
                GramMatrix(torch.zeros(len(exact), len(exact), dtype=torch.float64), exact)
            )
        else:
            combination = self.mix(GramMatrix.of(updates, exact, root))
        if len(updates) == 1 or not _is_identity(
            combination, len(updates)
        ):  # never return the caller's own memory
            rows = combination.applied(updates).to(torch.float32)
            if not bool(torch.isfinite(rows).all()):
                raise GymError(ErrorCode.UPDATE_REFUSED, "the updates' combination is not finite in float32")
        return self.combine(rows, combination.weights)

    def check(self, weights: Tensor) -> None:
        """Refuse a round in which the rule's guarantee would not hold.

        Raises:
            GymError: ``CONFIG_INVALID``, or ``USAGE`` for weights that are not positive.
        """
        if weights.numel() == 0 or not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise GymError(ErrorCode.USAGE, f"weights {weights.tolist()} are not all positive and finite")
        malicious, count = self.config.num_malicious_nodes, weights.numel()
        if malicious and not self.robust:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"aggregator {self.name!r} withstands no malicious client, but num_malicious_nodes is {malicious}",
                "choose a robust aggregator such as byzantine_robust",
            )
        if not self.weighted and bool((weights != weights[0]).any()):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"aggregator {self.name!r} gives every update one vote, but the weights differ",
                "use weighting: uniform, or a rule for weighted updates such as weighted_mean or trimmed_mean",
            )
        if count < self.minimum(malicious):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{counted(count, 'update', 'are')} too few for aggregator {self.name!r} to withstand "
                f"num_malicious_nodes: {malicious}, which needs {self.minimum(malicious)}",
                "wait for more contributors, or lower num_malicious_nodes",
            )
        if self.majority:
            _refuse_half(weights, malicious)


class CoordinateRule(Aggregator):
    """A rule that treats every coordinate separately.

    Implement ``formula``, or ``_aggregate`` if a kernel computes the same faster, or both.
    """

    coordinate_wise = True

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self._aggregate(rows, weights)

    def formula(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Compute the paper's formula: ``[m, block]`` values and ``[m]`` weights, float64, to ``[block]`` float64."""
        raise NotImplementedError(f"aggregator {self.name!r} defines neither formula nor _aggregate")

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Aggregate checked input: ``[m, block]`` float32 and ``[m]`` float64 weights to ``[block]`` float32."""
        return self.formula(updates.to(torch.float64), weights.to(torch.float64)).to(torch.float32)

    def combine_signs(self, bits: Sequence[Tensor], strengths: Tensor, weights: Tensor, out: Tensor) -> bool:
        drops = self.drops(weights)
        return drops is not None and signs.trimmed_mean(bits, strengths, drops, out)


class WeightRule(Aggregator):
    """A rule whose result is a linear combination of the updates, given by ``weigh``.

    It never sees a coordinate, so it works on sign bits and LoRA factors as well as on floats.
    """

    needs = Needs.PRODUCTS

    @classmethod
    def weighs_windows(cls) -> bool:
        return cls.needs <= Needs.EVIDENCE

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        return CombinationWeights.single(self.weigh(gram))

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows[0]

    def combine_signs(self, bits: Sequence[Tensor], strengths: Tensor, weights: Tensor, out: Tensor) -> bool:
        signs.combine(bits, strengths[0], out)
        return True

    @abstractmethod
    def weigh(self, gram: GramMatrix) -> Tensor:
        """Return the ``[n]`` float64 coefficients of the updates, for a checked round."""


def _is_identity(combination: CombinationWeights, count: int) -> bool:
    return combination.matrix.shape == (count, count) and torch.equal(
        combination.matrix, torch.eye(count, dtype=torch.float64)
    )


def _refuse_half(weights: Tensor, malicious: int) -> None:
    """Refuse weights if the ``malicious`` heaviest contributors hold half or more of the total.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    exact = weights.to(torch.float64)
    heaviest = exact.sort(descending=True).values[:malicious].sum()
    if bool(2 * heaviest >= exact.sum()):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"at least half of the weight belongs to the heaviest {malicious} of {counted(len(weights), 'update')}",
            "lower num_examples_cap, or use weighting: uniform",
        )
