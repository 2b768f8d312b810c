"""Settings for merging updates into a soup, with or without a hub: rule, clipping, weights and codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import EnumMeta, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.privacy import ReleasePrivacy
from gym_fed.config.schema.base import AcceptsAliases, StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, METHODS, PRE_AGGREGATORS, SERVER_OPTIMIZERS
from gym_fed.core.text import counted

_MALICIOUS = "num_malicious_nodes"


def _fits_64_bits(value: Any) -> Any:
    """Refuse integers beyond 64 bits, which the union would otherwise round to floats."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("an integer must fit 64 bits")
    return value


Option = Annotated[bool | int | float | Annotated[str, Field(max_length=256)], BeforeValidator(_fits_64_bits)]
"""The value of a rule's own setting. Contributors store the values that a hub announces, so their size is bounded."""

MERGE_VERSION = 2
"""The current version of the rules by which a merge reads updates. Version 1 reads ``bitdelta`` as sign bits and LoRA
as factors, and decodes everything else in whole rows. Version 2 reads every codec of signs and scales as sign bits,
uses blocks whose size does not depend on the row length, and uses size budgets in full."""


if TYPE_CHECKING:

    class _Words(EnumMeta):
        def __getattr__(cls, word: str) -> AggregationMethod: ...

    class AggregationMethod(StrEnum, metaclass=_Words):
        """The name of an aggregator or merge method; valid names are known only at run time."""

else:
    AggregationMethod = StrEnum(
        "AggregationMethod",
        {name.upper(): name for name in sorted({*AGGREGATORS.names(), *METHODS.names()})},
        module=__name__,
    )
    AggregationMethod.__doc__ = """Every built-in or installed aggregator and merge method, by name:
    ``AggregationMethod.KRUM`` is ``"krum"``."""


class SoupRecipe(StrictModel):
    """The rules of a merge. Rules and updates determine the soup's bytes."""

    aggregator: Annotated[str, MemberOf(AGGREGATORS)] = "mean"
    """Name of an aggregator from ``gym_fed/soup/aggregators`` or an installed package."""

    aggregator_options: dict[str, Option] = Field(default_factory=dict)
    """Further settings of the aggregator (its ``Config``)."""

    pre_aggregators: list[Annotated[str, MemberOf(PRE_AGGREGATORS)]] = Field(default_factory=list)
    """Names of steps before the aggregator, in order, from ``gym_fed/soup/pre_aggregators`` or installed packages."""

    pre_aggregator_options: dict[str, dict[str, Option]] = Field(default_factory=dict)
    """Further settings of pre-aggregators (their ``Config``), by name."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] = 0
    """Number of malicious clients that the merge must tolerate, f. A round needs at least 2f + 1 updates."""

    server_learning_rate: Annotated[float, Field(gt=0)] = 1.0
    """Factor by which the server optimiser's result is multiplied before it is encoded."""

    server_optimizer: Annotated[str, MemberOf(SERVER_OPTIMIZERS, ("none",))] = "none"
    """Server optimiser, a file of ``gym_fed/soup/optimizers``: ``momentum``, ``nesterov``, ``adam`` or ``yogi``;
    ``none`` adds the unchanged aggregate."""

    server_optimizer_options: dict[str, Option] = Field(default_factory=dict)
    """Further settings of the optimiser (its ``Config``)."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """L2 norm to which larger updates are scaled down; by default no clipping."""

    weighting: Literal["uniform", "num_examples", "reputation"] = "uniform"
    """Weights of the updates: equal, by the reported number of examples, or, on a hub, by reputation."""

    num_examples_cap: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of examples counted per update; required by ``weighting: num_examples``."""

    reputation_floor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Minimum weight, so that newcomers count; required by ``weighting: reputation``."""

    merge_version: Annotated[int, Field(ge=1, le=MERGE_VERSION)] = MERGE_VERSION
    """Version of the rules for reading updates: soups of versions 1 and 2 may differ in the last bits, so a round's
    recipe records it. Set it only to reproduce a soup of an older release."""

    codec: CodecPolicy = CodecPolicy()
    """Encoding of the soup; with ``error_feedback`` the server keeps the residual. On a hub the default is
    ``lattice`` for full fine-tuning, and ``as-merged`` for LoRA: the soup is sent as factors."""

    @classmethod
    def recorded(cls, stored: Mapping[str, Any]) -> SoupRecipe:
        """Return a recipe from a ledger, with merge version 1 if it records none."""
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
                "num_examples_cap is required for weighting: num_examples, and not allowed otherwise"
            )
        if (self.weighting == "reputation") != (self.reputation_floor is not None):
            raise ValueError(
                "reputation_floor is required for weighting: reputation, and not allowed otherwise"
            )
        for key in ("aggregator_options", "server_optimizer_options"):
            if _MALICIOUS in getattr(self, key):
                raise ValueError(f"{key}.{_MALICIOUS}: set soup.{_MALICIOUS}, which applies to every rule")
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
        """Refuse fewer ``contributors`` than any rule needs to outvote ``num_malicious_nodes``.

        Further requirements of a rule are checked by ``gym_fed.soup.pipeline.Pipeline.check``.

        Raises:
            GymError: ``CONFIG_INVALID`` with the required number.
        """
        needed = 1
        if self.num_malicious_nodes:
            needed = AGGREGATORS.type_of(self.aggregator).minimum(self.num_malicious_nodes)
        if contributors < needed:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"num_malicious_nodes: {self.num_malicious_nodes} needs at least {counted(needed, 'update')} a round, "
                f"not {contributors}",
                "lower num_malicious_nodes, or wait for more contributors",
            )

    def weights(self, num_examples: Sequence[int]) -> list[float]:
        """Return the weight of each update from the number of examples its contributor reports.

        Raises:
            GymError: ``CONFIG_INVALID`` for ``weighting: reputation``, which only a hub supports.
        """
        if self.reputation_floor is not None:
            reason = "weighting: reputation needs a hub, which keeps reputations"
            raise GymError(
                ErrorCode.CONFIG_INVALID, reason, "use weighting: uniform, or set weights with --weight"
            )
        if self.num_examples_cap is None:
            return [1.0] * len(num_examples)
        return [float(max(1, min(count, self.num_examples_cap))) for count in num_examples]


def _with_seed(options: Mapping[str, Option], server_round: int) -> dict[str, Option]:
    return {**options, "seed": int(options.get("seed", 0)) + server_round}


class DeltaSoupConfig(AcceptsAliases):
    """Settings that control how contributions are written, screened and merged."""

    method: Annotated[AggregationMethod, MemberOf(AGGREGATORS, others=(METHODS,))] = (
        AggregationMethod.BYZANTINE_ROBUST
    )
    """Aggregator, or merge method that needs only the deltas; built-in or from an installed package."""

    method_options: dict[str, Option] = Field(default_factory=dict)
    """Further settings of the method (its ``Config``)."""

    pre_aggregators: list[Annotated[str, MemberOf(PRE_AGGREGATORS)]] = Field(default_factory=list)
    """Steps before the aggregator, in addition to its own."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] | None = None
    """Number of malicious clients to tolerate, f; by default the method's. ``byzantine_robust`` tolerates a fifth of
    the contributors, and one of three or four; other methods none."""

    base_model: str | None = None
    """Base of the contributions: ``gym-nano``, a folder, or a name in the local cache."""

    root: str | None = None
    """The coordinator's own update, for methods that compare contributions with it: a ``.gymdelta``, or the folder of a
    model that was fine-tuned on clean rows."""

    codec: CodecPolicy = CodecPolicy(error_feedback=False)
    """Encoding of a contributed model as a delta; a contributed ``.gymdelta`` is unchanged."""

    soup_codec: CodecPolicy = Field(default_factory=lambda: CodecPolicy(codec="dense", error_feedback=False))
    """Encoding of the soup."""

    norm_ratio: Annotated[float, Field(gt=1)] | None = 4.0
    """Maximum norm as a multiple of the median norm; larger contributions are excluded (from 3 contributions on)."""

    num_examples_cap: Annotated[int, Field(ge=1)] | None = None
    """Maximum ``num_examples`` by which contributions are weighted; by default all have equal weight."""

    differential_privacy: ReleasePrivacy | None = None
    """Clip every contribution and add noise to the soup: zero-out differential privacy per contribution. The result
    reports epsilon. By default ``method`` is then the accounted one that keeps the most accuracy under attack
    (``root_gate`` with ``root``), and ``norm_ratio`` is None."""

    enable_rewards: bool = False
    """Split ``reward_pool`` evenly among the contributors whose updates are in the soup."""

    reward_pool: Annotated[int, Field(ge=0)] = 1000

    @model_validator(mode="after")
    def _default_private_keys(self) -> DeltaSoupConfig:
        """With ``differential_privacy``, set unset keys to those of the accounted rule that is most robust."""
        if self.differential_privacy is not None:
            rule = self.differential_privacy.best_rule(has_root=self.root is not None)
            for key, value in (("method", AggregationMethod(rule)), ("norm_ratio", None)):
                if key not in self.model_fields_set:
                    object.__setattr__(self, key, value)  # bypasses the frozen model
        return self

    @model_validator(mode="after")
    def _validate_soup(self) -> DeltaSoupConfig:
        for key in ("codec", "soup_codec"):
            if getattr(self, key).error_feedback:
                raise ValueError(
                    f"{key}.error_feedback: a DeltaSoup keeps no state between soups; set it to false"
                )
        rule = self._rule
        if self.root is None and rule is not None and rule.needs_root():
            raise ValueError(
                f"method {self.method} needs a root update; set root, the coordinator's own update"
            )
        if self.root is not None and not (rule is not None and rule.takes_root()):
            raise ValueError(
                f"method {self.method} takes no root update; remove root, or use method: fltrust_caf"
            )
        if self.codec.distill_steps or self.soup_codec.distill_steps:
            raise ValueError("distill_steps: a DeltaSoup has no data to distil on; use BitDeltaQuantizer")
        if self.differential_privacy is None:
            return self
        if self.norm_ratio is not None:
            raise ValueError(
                "norm_ratio excludes contributions by the norms of all, which no noise covers; with "
                "differential_privacy write norm_ratio: null (None in Python)"
            )
        _refuse_methods(self.method, self.differential_privacy)
        self.differential_privacy.refuse_unaccounted(self.recipe(1))
        return self

    def malicious_of(self, contributors: int) -> int:
        """Return the number of malicious clients to tolerate among N contributors."""
        if self.num_malicious_nodes is not None:
            return self.num_malicious_nodes
        return 0 if self._rule is None else int(self._rule.default_malicious(contributors))

    @property
    def _rule(self) -> Any:
        """The aggregator's class; None for a merge method."""
        return AGGREGATORS.type_of(self.method.value) if self.method.value in AGGREGATORS else None

    def recipe(self, contributors: int) -> SoupRecipe:
        """Return these settings as the recipe of a round with N contributors; the method must be an aggregator."""
        return SoupRecipe(
            aggregator=self.method.value,
            aggregator_options=self.method_options,
            pre_aggregators=self.pre_aggregators,
            num_malicious_nodes=self.malicious_of(contributors),
            weighting="num_examples" if self.num_examples_cap is not None else "uniform",
            num_examples_cap=self.num_examples_cap,
            codec=self.soup_codec,
        )


def _refuse_methods(method: AggregationMethod, privacy: ReleasePrivacy) -> None:
    if not privacy.accounts_for(method.value):
        raise ValueError(
            f"method {method.value!r}: the effect of one contribution has no known bound, so no noise can cover it; "
            f"with differential_privacy use {' or '.join(privacy.accounted())}"
        )
