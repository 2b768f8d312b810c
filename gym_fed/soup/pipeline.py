"""A recipe's rules in order: pre-aggregators, then one aggregator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.building import build_aggregator, build_pre_aggregators
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs, RowEvidence
from gym_fed.soup.pre_aggregator import PreAggregator


class Pipeline:
    """The rules of a round, applied to inner products and then to coordinates.

    Args:
        pre_aggregators: Steps before the aggregator, in their order.
        aggregator: The final step.
    """

    def __init__(self, pre_aggregators: Sequence[PreAggregator], aggregator: Aggregator) -> None:
        self.pre_aggregators = tuple(pre_aggregators)
        self.aggregator = aggregator

    @classmethod
    def of(cls, recipe: SoupRecipe) -> Pipeline:
        """Build the rules of a recipe.

        Raises:
            GymError: ``CONFIG_INVALID`` for settings that a rule does not have, and for weights that it would ignore.
        """
        pipeline = cls(build_pre_aggregators(recipe), build_aggregator(recipe))
        if recipe.weighting != "uniform" and not pipeline.aggregator.weighted:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"weighting: {recipe.weighting} has no effect on aggregator {recipe.aggregator!r}, for which every "
                "update has one vote",
                "use weighting: uniform, or a rule for weighted updates such as weighted_mean or trimmed_mean",
            )
        return pipeline

    @property
    def needs(self) -> Needs:
        """The largest ``Needs`` of the rules."""
        return max((rule.needs for rule in (*self.pre_aggregators, self.aggregator)), default=Needs.NOTHING)

    def check(self, weights: Tensor) -> None:
        """Refuse a round in which the rules' guarantees do not hold.

        Args:
            weights: ``[n]`` weights of the round's updates.

        Raises:
            GymError: ``CONFIG_INVALID`` with the number of updates that the rule needs; ``USAGE`` for weights that
                are not positive.
        """
        rows = weights.numel()
        for step in self.pre_aggregators:
            rows = step.rows(rows)
        if rows == weights.numel():
            self.aggregator.check(weights)
            return
        if bool((weights != weights[0]).any()):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "updates of unequal weight cannot be put into buckets: one malicious client's weight "
                "would count for its bucket",
                "use weighting: uniform, or remove bucketing",
            )
        self.aggregator.check(torch.ones(rows))

    def check_evidence(self, evidence: RowEvidence | None = None, count: int = 0) -> None:
        """Refuse evidence for rules that do not use it, and evidence that is not about ``count`` updates.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``USAGE``.
        """
        if self.needs is not Needs.EVIDENCE:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"aggregator {self.aggregator.name!r} uses no verdicts on updates",
                "use aggregator: byzantine_evidence",
            )
        if self.pre_aggregators:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"pre_aggregators {', '.join(step.name for step in self.pre_aggregators)} change the updates that "
                f"aggregator {self.aggregator.name!r} has verdicts on",
                "remove soup.pre_aggregators, or root",
            )
        if evidence is not None and len(evidence.verdicts) != count:
            raise GymError(ErrorCode.USAGE, f"{count} updates but {len(evidence.verdicts)} verdicts")
        if evidence is not None and not 0.0 < evidence.length <= 1.0:
            raise GymError(
                ErrorCode.USAGE, f"the soup's length {evidence.length:g} is not a share of its full length"
            )

    def plan(self, gram: GramMatrix) -> CombinationWeights:
        """Return the linear combinations of the updates on which the aggregator's ``combine`` works."""
        total = CombinationWeights.identity(gram.weights)
        for step in self.pre_aggregators:
            combination = step.mix(gram)
            total = combination.after(total)
            gram = gram.combined(combination)
        return self.aggregator.mix(gram).after(total)

    def aggregate(self, updates: Tensor, weights: Tensor, root: Tensor | None = None) -> Tensor:
        """Merge updates in memory, ``[n, d]`` float32 to ``[d]`` float32; see ``Aggregator.aggregate``.

        Raises:
            GymError: The errors from ``Aggregator.aggregate``.
        """
        if not self.pre_aggregators:
            return self.aggregator.aggregate(updates, weights, root)
        self.check(weights)
        return _Composed(self).aggregate(updates, weights, root)


class _Composed(Aggregator):
    """A pipeline as a single aggregator, which shares the input checks of ``Aggregator.aggregate``."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.aggregator.config)
        self._pipeline = pipeline
        self.name = pipeline.aggregator.name  # type: ignore[misc]
        self.needs = pipeline.needs  # type: ignore[misc]
        self.robust = pipeline.aggregator.robust  # type: ignore[misc]
        self.weighted = pipeline.aggregator.weighted  # type: ignore[misc]

    @classmethod
    def minimum(cls, malicious: int) -> int:
        return 0  # the pipeline has checked the needs of each rule

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        return self._pipeline.plan(gram)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self._pipeline.aggregator.combine(rows, weights)
