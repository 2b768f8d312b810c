"""Norm cap: scale down an update whose norm exceeds the cap.

It clips to a quantile of the round's own norms (Sun et al. 2019, "Can You Really Backdoor Federated Learning?", for a
fixed bound; the median as in Karimireddy et al. 2022). Size alone is then useless to malicious clients, but an
aggregator must still outvote them. The quantile is always one of the norms, the lower one if it lies between two: with
f malicious clients out of n >= 2f + 1, the median never exceeds an honest norm. For a sign delta only the scale
changes, exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.pre_aggregator import PreAggregator
from gym_fed.soup.rule import RuleConfig

if TYPE_CHECKING:
    from torch import Tensor


class NormCapConfig(RuleConfig):
    quantile: Annotated[float, Field(ge=0, le=1)] | None = None
    """Quantile of the round's norms that is the cap; 0.5, the median, if ``max_norm`` is absent too."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """Fixed cap, instead of a quantile."""

    @model_validator(mode="after")
    def _one_of_both(self) -> NormCapConfig:
        if self.quantile is not None and self.max_norm is not None:
            raise ValueError("quantile and max_norm are two ways to set the cap: set only one")
        return self


class NormCap(PreAggregator):
    name = "norm_cap"
    needs = Needs.NORMS
    Config = NormCapConfig
    config: NormCapConfig

    def rows(self, count: int) -> int:
        """Return ``count``; refuse a quantile that malicious clients could set."""
        malicious = self.num_malicious_nodes
        if self.config.max_norm is None and self._rank(count) >= count - malicious:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"quantile {self._quantile:g} of {count} norms may be the norm of a malicious client "
                f"(num_malicious_nodes: {malicious})",
                f"lower quantile to {(count - malicious - 1) / max(1, count - 1):.4g} or less, or set max_norm",
            )
        return count

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        self.rows(gram.count)
        norms = gram.norms()
        cap = self.config.max_norm
        if cap is None:
            cap = float(norms.sort().values[self._rank(gram.count)])
        return CombinationWeights.scaled(capped(norms, cap), gram.weights)

    @property
    def _quantile(self) -> float:
        return 0.5 if self.config.quantile is None else self.config.quantile

    def _rank(self, count: int) -> int:
        return int(self._quantile * (count - 1))


def capped(norms: Tensor, cap: float) -> Tensor:
    """Return ``[n]`` float64 factors that bring every norm to at most ``cap``; exactly 1 for norms below it."""
    return torch.where(norms > cap, cap / norms.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
