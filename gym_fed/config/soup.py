"""How a round's updates become one soup: the rule, clipping, weights, and the codec of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gym_fed.config.base import StrictModel
from gym_fed.config.delta import CodecPolicy
from gym_fed.errors import ErrorCode, GymError

_RULES = Path(__file__).resolve().parents[1] / "soup"

_LIARS = "num_malicious_nodes"
_TRUSTS_A_ROOT = "fltrust"

Option = bool | int | float | str

MERGE_VERSION = 2
"""How updates are read by a merge, the newest way. 1: sign bits of ``bitdelta``, factors, everything else decoded in
whole rows. 2: sign bits of every codec that stores exactly those, and blocks that do not grow with a row's length."""


class AggregationMethod(StrEnum):
    """Every aggregator, and every merge method, by the name of its file."""

    BYZANTINE_ROBUST = "byzantine_robust"
    MEAN = "mean"
    WEIGHTED_MEAN = "weighted_mean"
    MEDIAN = "median"
    TRIMMED_MEAN = "trimmed_mean"
    MEAN_AROUND_MEDIAN = "mean_around_median"
    KRUM = "krum"
    MULTI_KRUM = "multi_krum"
    BULYAN = "bulyan"
    GEOMETRIC_MEDIAN = "geometric_median"
    CENTRED_CLIPPING = "centred_clipping"
    CAF = "caf"
    MINIMUM_DIAMETER = "minimum_diameter"
    MAJORITY_VOTE = "majority_vote"
    FLTRUST = "fltrust"
    FLTRUST_CAF = "fltrust_caf"
    LINEAR = "linear"
    TASK_ARITHMETIC = "task_arithmetic"
    TIES = "ties"
    DARE_LINEAR = "dare_linear"
    DARE_TIES = "dare_ties"
    DELLA = "della"
    BREADCRUMBS = "breadcrumbs"
    MODEL_STOCK = "model_stock"
    SCE = "sce"
    KARCHER = "karcher"
    FISHER = "fisher"
    REGMEAN = "regmean"
    GREEDY_SOUP = "greedy_soup"


class SoupRecipe(StrictModel):
    """The rules of a merge. Together with the updates it determines the soup's bytes."""

    aggregator: str = "mean"
    """A file of ``gym_fed/soup/aggregators``."""

    aggregator_options: dict[str, Option] = Field(default_factory=dict)
    """Further keys of the aggregator's own ``Config``."""

    pre_aggregators: list[str] = Field(default_factory=list)
    """Files of ``gym_fed/soup/pre_aggregators``, in the order in which they work before the aggregator."""

    pre_aggregator_options: dict[str, dict[str, Option]] = Field(default_factory=dict)
    """Further keys of a pre-aggregator's own ``Config``, by its name."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] = 0
    """How many liars the merge must withstand, f. A round needs at least 2f + 1 updates."""

    server_learning_rate: Annotated[float, Field(gt=0)] = 1.0
    """What the server optimiser makes of the aggregate is multiplied by this before it is encoded."""

    server_optimizer: str = "none"
    """A file of ``gym_fed/soup/optimizers``: ``momentum``, ``adam`` or ``yogi`` on top of the soup; ``none`` adds the
    aggregate as it is."""

    server_optimizer_options: dict[str, Option] = Field(default_factory=dict)
    """Further keys of the optimiser's own ``Config``."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """An update with a larger L2 norm is scaled down to it; absent means no clipping."""

    weighting: Literal["uniform", "num_examples", "reputation"] = "uniform"
    """One contributor one vote; or by the number of examples each says it trained on; or, on a hub, by the reputation
    that each has earned there."""

    num_examples_cap: Annotated[int, Field(ge=1)] | None = None
    """num_examples: nobody counts for more examples than this, whatever is claimed; required there."""

    reputation_floor: Annotated[float, Field(gt=0, le=1)] | None = None
    """reputation: nobody counts for less than this, so that newcomers are heard; required there."""

    merge_version: Annotated[int, Field(ge=1, le=MERGE_VERSION)] = MERGE_VERSION
    """How updates are read: soups of versions 1 and 2 may differ in the last bits, so that a round's recipe records it.
    Leave it out but to make a soup of an older release again."""

    codec: CodecPolicy = CodecPolicy()
    """How the soup is written down; with ``error_feedback`` the server keeps the residual. On a hub whose recipe trains
    LoRA, absent means ``as-merged``: the soup travels as factors."""

    @classmethod
    def recorded(cls, stored: Mapping[str, Any]) -> SoupRecipe:
        """A recipe as a ledger has it: one that names no ``merge_version`` was written when there was but the first."""
        return cls.model_validate({"merge_version": 1, **stored})

    @field_validator("aggregator")
    @classmethod
    def _known(cls, name: str) -> str:
        _require_known(name, "aggregator", "aggregator")
        return name

    @field_validator("server_optimizer")
    @classmethod
    def _known_optimizer(cls, name: str) -> str:
        if name != "none":
            _require_known(name, "optimizer", "server optimizer")
        return name

    @field_validator("pre_aggregators")
    @classmethod
    def _known_and_once(cls, names: list[str]) -> list[str]:
        for name in names:
            _require_known(name, "pre_aggregator", "pre-aggregator")
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is listed twice")
        return names

    @model_validator(mode="after")
    def _consistent(self) -> SoupRecipe:
        if (self.weighting == "num_examples") != (self.num_examples_cap is not None):
            raise ValueError(
                "num_examples_cap is required for weighting: num_examples and belongs to no other"
            )
        if (self.weighting == "reputation") != (self.reputation_floor is not None):
            raise ValueError("reputation_floor is required for weighting: reputation and belongs to no other")
        for key in ("aggregator_options", "server_optimizer_options"):
            if _LIARS in getattr(self, key):
                raise ValueError(f"{key}.{_LIARS}: set soup.{_LIARS}, which holds for every rule")
        for name, options in self.pre_aggregator_options.items():
            if _LIARS in options:
                raise ValueError(f"pre_aggregator_options.{name}.{_LIARS}: set soup.{_LIARS} instead")
        if self.server_optimizer == "none" and self.server_optimizer_options:
            raise ValueError("server_optimizer_options need a server_optimizer")
        for name in self.pre_aggregator_options:
            if name not in self.pre_aggregators:
                raise ValueError(
                    f"pre_aggregator_options are for {name!r}, which pre_aggregators does not list"
                )
        return self

    def for_round(self, server_round: int) -> SoupRecipe:
        """The recipe of one round: what draws lots (``bucketing``) draws others every round."""
        if "bucketing" not in self.pre_aggregators:
            return self
        options = self.pre_aggregator_options.get("bucketing", {})
        seeded = {**options, "seed": int(options.get("seed", 0)) + server_round}
        update = {"pre_aggregator_options": {**self.pre_aggregator_options, "bucketing": seeded}}
        return self.model_copy(update=update)

    def check_feasible(self, contributors: int) -> None:
        """Whether ``contributors`` updates are enough to outvote ``num_malicious_nodes``, by any rule.

        What a rule needs beyond that is asked of the rule itself (``gym_fed.soup.pipeline.Pipeline.check``).

        Raises:
            GymError: ``CONFIG_INVALID`` with the number that is needed.
        """
        majority = 1 if self.aggregator == _TRUSTS_A_ROOT else 2  # whom the root vouches for need not outvote
        needed = majority * self.num_malicious_nodes + 1
        if contributors < needed:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"num_malicious_nodes: {self.num_malicious_nodes} needs at least {needed} updates a round, "
                f"not {contributors}",
                "lower num_malicious_nodes, or wait for more contributors",
            )

    def weights(self, num_examples: Sequence[int]) -> list[float]:
        """A weight for each update from the number of examples its contributor claims.

        Raises:
            GymError: ``CONFIG_INVALID`` for ``weighting: reputation``, which only a hub knows.
        """
        if self.reputation_floor is not None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "weighting: reputation needs a hub, which keeps reputations",
                "use weighting: uniform, or weigh by --weight",
            )
        if self.num_examples_cap is None:
            return [1.0] * len(num_examples)
        return [float(max(1, min(count, self.num_examples_cap))) for count in num_examples]


def _require_known(name: str, kind: str, noun: str) -> None:
    known = sorted(info.name for info in iter_modules([str(_RULES / f"{kind}s")]))
    if name not in known:
        raise ValueError(f"unknown {noun} {name!r} (known: {', '.join(known)})")
