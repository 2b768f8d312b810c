"""Differential privacy settings of hubs, of merges without a server, and of tasks.

Names follow Opacus: ``noise_multiplier`` is the noise's standard deviation divided by the sensitivity, and
``max_grad_norm`` the norm to which an example's gradient is clipped. The delta of a guarantee is always called
``target_delta``, since "delta" alone means an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import Problem, Problems, StrictModel
from gym_fed.core.registries import AGGREGATORS

TargetDelta = Annotated[float, Field(gt=0, le=0.01)]
"""The delta of (epsilon, delta) privacy: the probability that epsilon does not hold, which must be small."""

Mechanism = Literal["gaussian", "discrete_gaussian"]

_FACTS: dict[Mechanism, str] = {"gaussian": "bounds_one", "discrete_gaussian": "counts_votes"}
"""Attribute of aggregators whose L2 sensitivity to one contributor is covered by the mechanism."""

_BEST_RULES: dict[Mechanism, tuple[str, ...]] = {
    "gaussian": ("root_gate", "mean"),
    "discrete_gaussian": ("majority_vote", "mean"),
}
"""Accounted rules by accuracy under attack at epsilon 8, best first, measured on data and seeds used for nothing else:
dataset ``clusters`` of ``benchmarks/robust_private.py``, ``--first-seed 20``."""

_MAX_MULTIPLIER = 4096.0
"""Maximum noise multiplier; above it, the noise on a lattice of 2^20 steps per clipping norm has a standard deviation
above ``gym_fed.privacy.noise.MAX_STD``."""


class AdaptiveClipping(StrictModel):
    """Clipping at a quantile of the updates' norms (Andrew et al. 2021, arXiv:1905.03871, algorithm 1)."""

    target_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Target fraction of updates within the clipping norm, gamma."""

    learning_rate: Annotated[float, Field(gt=0, le=2)] = 0.2
    """Step of the geometric update of the norm, eta_C."""

    count_noise_std: Annotated[float, Field(gt=0)]
    """Standard deviation of the noise on the number of updates within the norm, sigma_b; the paper uses a twentieth
    of the round's contributors. The soup's noise is raised to compensate, so the cost of a round is unchanged."""


class ReleasePrivacy(StrictModel):
    """The privacy settings of a noisy merge: mechanism, noise and clipping."""

    mechanism: Mechanism = "gaussian"
    """``gaussian`` adds noise to the sum of clipped updates; ``discrete_gaussian`` to integer votes on signs."""

    noise_multiplier: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Standard deviation of a round's noise, divided by the maximum change of the result by one contributor."""

    clipping_norm: Annotated[float, Field(gt=0)] = 1.0
    """L2 norm to which larger updates are clipped; with ``discrete_gaussian``, the norm of one contributor's votes."""

    clipping: Literal["whole", "per_layer"] = "whole"
    """``per_layer`` clips each of L tensors to ``clipping_norm / sqrt(L)`` (McMahan et al. 2018, arXiv:1710.06963)."""

    target_delta: TargetDelta = 1e-5

    @model_validator(mode="after")
    def _validate_clipping(self) -> ReleasePrivacy:
        if self.mechanism == "discrete_gaussian" and self.clipping != "whole":
            raise ValueError("clipping: votes are not clipped; per_layer belongs to mechanism: gaussian")
        return self

    def accounts_for(self, aggregator: str) -> bool:
        """Return True if this noise covers one contributor's influence on the result of ``aggregator``."""
        return aggregator in AGGREGATORS and bool(
            getattr(AGGREGATORS.type_of(aggregator), _FACTS[self.mechanism])
        )

    def best_rule(self, *, has_root: bool) -> str:
        """Return the accounted rule with the highest accuracy under attack.

        Args:
            has_root: True if the coordinator has a root update, which some rules need.
        """
        rules = _BEST_RULES[self.mechanism]
        return next(name for name in rules if has_root or not AGGREGATORS.type_of(name).needs_root())

    def accounted(self) -> tuple[str, ...]:
        """Return the built-in aggregators that this noise covers."""
        return AGGREGATORS.own_with(_FACTS[self.mechanism])

    def refuse_unaccounted(self, soup: Any) -> None:
        """Raise ``Problems`` if the accounting does not cover a merge by ``soup``, a ``SoupRecipe``."""
        problems = list(self.unaccounted(soup))
        if problems:
            raise Problems("", problems)

    def unaccounted(self, soup: Any) -> Iterator[Problem]:
        """Yield the settings of ``soup`` that the accounting does not cover."""
        if not self.accounts_for(soup.aggregator):
            yield Problem(
                "soup.aggregator",
                f"{soup.aggregator!r}: the effect of one contributor has no known bound, so no noise can cover it; "
                f"with privacy.mechanism {self.mechanism!r} use {' or '.join(self.accounted())}",
            )
        if soup.pre_aggregators:
            yield Problem(
                "soup.pre_aggregators",
                f"{soup.pre_aggregators}: they compare updates with each other, so one update can change the "
                "effect of all others; remove them (privacy.clipping_norm caps the norms)",
            )
        if soup.max_norm is not None:
            yield Problem(
                "soup.max_norm", "has no effect, since privacy.clipping_norm clips updates; remove it"
            )
        if soup.weighting != "uniform":
            yield Problem(
                "soup.weighting",
                f"{soup.weighting!r}: weights that depend on the data are not accounted for; use uniform",
            )


class PrivacyConfig(ReleasePrivacy):
    """Contributor-level differential privacy on the hub: clip, add, noise, account; the run stops at the budget.

    Adjacency: two runs are neighbours if one contributor's updates are all replaced by zero (zero-out, Kairouz et
    al. 2021, arXiv:2103.00039). Who takes part is public (it is in the ledger), so no amplification by sampling is
    claimed.
    """

    adaptive_clipping: AdaptiveClipping | None = None
    """Adapt the clipping norm to the updates; by default it is constant."""

    epsilon: Annotated[float, Field(gt=0)]
    """Maximum epsilon of the run. A round that would exceed it does not start."""

    end_when_spent: bool = False
    """Allow more ``rounds.num_rounds`` than the budget pays for: the run ends when the budget is spent."""

    @model_validator(mode="after")
    def _validate_count(self) -> PrivacyConfig:
        if self.adaptive_clipping is None:
            return self
        if self.mechanism == "discrete_gaussian":
            raise ValueError(
                "adaptive_clipping: sign votes all have the same norm, so there is nothing to adapt; use "
                "mechanism: gaussian"
            )
        count_noise, lower_bound = self.adaptive_clipping.count_noise_std, 0.5 * self.noise_multiplier
        if count_noise <= lower_bound:
            raise ValueError(
                f"adaptive_clipping.count_noise_std must be above noise_multiplier / 2 = {lower_bound:g}; otherwise "
                "the count alone exceeds the privacy cost of a round"
            )
        sum_noise = (self.noise_multiplier**-2 - (2 * count_noise) ** -2) ** -0.5
        if sum_noise > _MAX_MULTIPLIER:
            raise ValueError(
                f"adaptive_clipping.count_noise_std {count_noise:g} leaves the sum so little of the budget that its "
                f"noise is {sum_noise:.3g} times the clipping norm, which is too large to sample; raise it"
            )
        return self


class LocalPrivacy(StrictModel):
    """DP-SGD on the contributor's machine (Abadi et al. 2016, arXiv:1607.00133): example-level, by Opacus.

    Adjacency: two datasets are neighbours if one has one more example. Batches are Poisson samples.
    """

    noise_multiplier: Annotated[float, Field(gt=0)] = 1.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """L2 norm to which the gradient of every example is clipped."""

    target_delta: TargetDelta = 1e-5
    grad_sample_mode: Literal["hooks", "functorch", "ghost"] = "hooks"
    """Computation of per-example gradients; ``ghost`` computes only their norms and needs less memory."""


class SecureAggregationConfig(StrictModel):
    """Secure aggregation: the hub learns only the sum of the updates' votes (Bonawitz et al. 2017)."""

    threshold: Annotated[int, Field(ge=2, le=200)] = 3
    """Minimum contributors at the end of a round, unless rounds.min_contributors is larger. Fewer
    cannot learn anything together, and neither can the hub. It must be more than half of ``begin_with``, so that a
    cheating hub cannot unmask single updates. After 2 * threshold - 1 have begun, others wait for the next round."""

    begin_with: Annotated[int, Field(ge=2)] | None = None
    """Contributors that a round waits for before keys are shared; those above the minimum may drop out. By default the
    larger of threshold and rounds.min_contributors, so that none may drop out."""

    stage_seconds: Annotated[float, Field(gt=0)] = 300
    """Timeout of key sharing and of unmasking; training uses the round's deadline."""

    step_norm: Annotated[float, Field(gt=0)] | None = None
    """L2 norm of one contributor's step: a vote moves a weight by step_norm / sqrt(weights) over the contributors.
    Required without ``privacy``; omit it otherwise, since privacy.clipping_norm is used."""


class SecureTask(StrictModel):
    """The properties of a secure round that a contributor needs before it trains."""

    threshold: Annotated[int, Field(ge=2)]
    """Shares that reconstruct a secret. A contributor refuses a task unless these exceed half of those who begin."""
