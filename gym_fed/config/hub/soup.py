"""Settings of how updates become a soup: the rule, clipping, weights, and the codec of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import EnumMeta, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, METHODS, PRE_AGGREGATORS, SERVER_OPTIMIZERS

_MALICIOUS = "num_malicious_nodes"

Option = bool | int | float | str

MERGE_VERSION = 2
"""How updates are read by a merge, the newest way. 1: sign bits of ``bitdelta``, factors, everything else decoded in
whole rows. 2: sign bits of every codec that stores exactly those,
blocks no larger for longer rows, and budgets spent to the end."""


if TYPE_CHECKING:

    class _Words(EnumMeta):
        def __getattr__(cls, word: str) -> AggregationMethod: ...

    class AggregationMethod(StrEnum, metaclass=_Words):
        """An aggregator or merge method by name; its members are known at run time."""

else:
    AggregationMethod = StrEnum(
        "AggregationMethod",
        {name.upper(): name for name in sorted({*AGGREGATORS.names(), *METHODS.names()})},
        module=__name__,
    )
    AggregationMethod.__doc__ = """Every aggregator and merge method, ours and of installed packages, by name:
    ``AggregationMethod.KRUM`` is ``"krum"``."""


class SoupRecipe(StrictModel):
    """The rules of a merge. Together with the updates it determines the soup's bytes."""

    aggregator: Annotated[str, MemberOf(AGGREGATORS)] = "mean"
    """A file of ``gym_fed/soup/aggregators``, or an aggregator of an installed package."""

    aggregator_options: dict[str, Option] = Field(default_factory=dict)
    """Further keys of the aggregator's own ``Config``."""

    pre_aggregators: list[Annotated[str, MemberOf(PRE_AGGREGATORS)]] = Field(default_factory=list)
    """Files of ``gym_fed/soup/pre_aggregators``, or of installed packages, in the order in which they work before the
    aggregator."""

    pre_aggregator_options: dict[str, dict[str, Option]] = Field(default_factory=dict)
    """Further keys of a pre-aggregator's own ``Config``, by its name."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] = 0
    """Number of malicious clients that the merge must withstand, f. A round needs at least 2f + 1 updates."""

    server_learning_rate: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the server optimiser's result before it is encoded."""

    server_optimizer: Annotated[str, MemberOf(SERVER_OPTIMIZERS, ("none",))] = "none"
    """A file of ``gym_fed/soup/optimizers``: ``momentum``, ``adam`` or ``yogi`` on top of the soup; ``none`` adds the
    aggregate as it is."""

    server_optimizer_options: dict[str, Option] = Field(default_factory=dict)
    """Further keys of the optimiser's own ``Config``."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """L2 norm to which larger updates are scaled down; absent means no clipping."""

    weighting: Literal["uniform", "num_examples", "reputation"] = "uniform"
    """Weights of the updates: equal, by the reported number of examples, or, on a hub, by reputation."""

    num_examples_cap: Annotated[int, Field(ge=1)] | None = None
    """Limit of the examples that an update counts for; required by ``weighting: num_examples``."""

    reputation_floor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Minimum weight, so that newcomers count; required by ``weighting: reputation``."""

    merge_version: Annotated[int, Field(ge=1, le=MERGE_VERSION)] = MERGE_VERSION
    """How updates are read: soups of versions 1 and 2 may differ in the last bits, so that a round's recipe records it.
    Leave it out but to make a soup of an older release again."""

    codec: CodecPolicy = CodecPolicy()
    """Encoding of the soup; with ``error_feedback`` the server keeps the residual. On a hub whose recipe trains
    LoRA, absent means ``as-merged``: the soup travels as factors."""

    @classmethod
    def recorded(cls, stored: Mapping[str, Any]) -> SoupRecipe:
        """Return a recipe from a ledger: one without ``merge_version`` was written when there was only the first."""
        return cls.model_validate({"merge_version": 1, **stored})

    @field_validator("pre_aggregators")
    @classmethod
    def _validate_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is listed twice")
        return names

    @model_validator(mode="after")
    def _validate_combinations(self) -> SoupRecipe:
        if (self.weighting == "num_examples") != (self.num_examples_cap is not None):
            raise ValueError(
                "num_examples_cap is required for weighting: num_examples and belongs to no other"
            )
        if (self.weighting == "reputation") != (self.reputation_floor is not None):
            raise ValueError("reputation_floor is required for weighting: reputation and belongs to no other")
        for key in ("aggregator_options", "server_optimizer_options"):
            if _MALICIOUS in getattr(self, key):
                raise ValueError(f"{key}.{_MALICIOUS}: set soup.{_MALICIOUS}, which holds for every rule")
        for name, options in self.pre_aggregator_options.items():
            if _MALICIOUS in options:
                raise ValueError(f"pre_aggregator_options.{name}.{_MALICIOUS}: set soup.{_MALICIOUS} instead")
        if self.server_optimizer == "none" and self.server_optimizer_options:
            raise ValueError("server_optimizer_options need a server_optimizer")
        for name in self.pre_aggregator_options:
            if name not in self.pre_aggregators:
                raise ValueError(
                    f"pre_aggregator_options are for {name!r}, which pre_aggregators does not list"
                )
        return self

    def for_round(self, server_round: int) -> SoupRecipe:
        """Return the recipe of one round; rules with random draws (``draws_lots``) draw differently each round."""
        changed: dict[str, Any] = {}
        if AGGREGATORS.type_of(self.aggregator).draws_lots:
            changed["aggregator_options"] = _with_seed(self.aggregator_options, server_round)
        drawing = [name for name in self.pre_aggregators if PRE_AGGREGATORS.type_of(name).draws_lots]
        if drawing:
            given = self.pre_aggregator_options
            seeded = {name: _with_seed(given.get(name, {}), server_round) for name in drawing}
            changed["pre_aggregator_options"] = {**given, **seeded}
        return self.model_copy(update=changed) if changed else self

    def check_feasible(self, contributors: int) -> None:
        """Refuse too few ``contributors`` to outvote ``num_malicious_nodes``, by any rule.

        What a rule needs beyond that is checked by the rule itself (``gym_fed.soup.pipeline.Pipeline.check``).

        Raises:
            GymError: ``CONFIG_INVALID`` with the number that is needed.
        """
        needed = 1
        if self.num_malicious_nodes:
            needed = AGGREGATORS.type_of(self.aggregator).minimum(self.num_malicious_nodes)
        if contributors < needed:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"num_malicious_nodes: {self.num_malicious_nodes} needs at least {needed} updates a round, "
                f"not {contributors}",
                "lower num_malicious_nodes, or wait for more contributors",
            )

    def weights(self, num_examples: Sequence[int]) -> list[float]:
        """Return a weight for each update from the number of examples that its contributor claims.

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


def _with_seed(options: Mapping[str, Option], server_round: int) -> dict[str, Option]:
    return {**options, "seed": int(options.get("seed", 0)) + server_round}
