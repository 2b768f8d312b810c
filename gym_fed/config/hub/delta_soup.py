"""Settings of ``gym_fed.quantization.DeltaSoup``: a merge without a server."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.privacy import ReleasePrivacy
from gym_fed.config.hub.soup import AggregationMethod, Option, SoupRecipe
from gym_fed.config.schema.base import ReadsOtherWords
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import AGGREGATORS, METHODS, PRE_AGGREGATORS

_PRIVATE_METHOD = AggregationMethod.MEAN
"""Of the accounted rules without a root update the one that keeps most accuracy under attack, at every epsilon
(``benchmarks/robust_private.py``): trimmed mean and median pay for their robustness with noise."""


class DeltaSoupConfig(ReadsOtherWords):
    """Settings of how contributions are written, screened and merged."""

    method: Annotated[AggregationMethod, MemberOf(AGGREGATORS, others=(METHODS,))] = (
        AggregationMethod.BYZANTINE_ROBUST
    )
    """An aggregator, or a merge method that needs only the deltas; ours, or an installed package's."""

    method_options: dict[str, Option] = Field(default_factory=dict)
    """Further keys of the method's own ``Config``."""

    pre_aggregators: list[Annotated[str, MemberOf(PRE_AGGREGATORS)]] = Field(default_factory=list)
    """Steps before the aggregator, beyond those that it has of its own."""

    num_malicious_nodes: Annotated[int, Field(ge=0)] | None = None
    """Malicious clients to withstand, f. Absent: the method's default. ``byzantine_robust`` withstands a fifth of the
    contributors, and one of three or four; the other methods none."""

    base_model: str | None = None
    """The base of the contributions: ``gym-nano``, a folder, or a name in the local cache."""

    codec: CodecPolicy = CodecPolicy(error_feedback=False)
    """Encoding of a contributed model as a delta; a contributed ``.gymdelta`` is unchanged."""

    soup_codec: CodecPolicy = Field(default_factory=lambda: CodecPolicy(codec="dense", error_feedback=False))
    """Encoding of the soup."""

    norm_ratio: Annotated[float, Field(gt=1)] | None = 4.0
    """A contribution whose norm is above this multiple of the median norm stays out (from 3 contributions on)."""

    num_examples_cap: Annotated[int, Field(ge=1)] | None = None
    """Weigh contributions by their ``num_examples``, up to this; absent: one contributor, one vote."""

    differential_privacy: ReleasePrivacy | None = None
    """Clip every contribution and noise the soup, so that it hides whether any one of them was zero; the result says
    at what epsilon. ``method`` is then ``mean`` and ``norm_ratio`` None, unless they are given."""

    enable_rewards: bool = False
    """Share ``reward_pool`` out evenly among the contributors whose work is in the soup."""

    reward_pool: Annotated[int, Field(ge=0)] = 1000

    @model_validator(mode="before")
    @classmethod
    def _default_private_keys(cls, values: Any) -> Any:
        """With ``differential_privacy``, set open keys to the accounted rule with the highest tolerance."""
        if isinstance(values, dict) and values.get("differential_privacy") is not None:
            return {"method": _PRIVATE_METHOD, "norm_ratio": None, **values}
        return values

    @model_validator(mode="after")
    def _validate_stateless(self) -> DeltaSoupConfig:
        for key in ("codec", "soup_codec"):
            if getattr(self, key).error_feedback:
                raise ValueError(
                    f"{key}.error_feedback: a DeltaSoup keeps nothing between soups; set it to false"
                )
        if "method" in self.model_fields_set and self._rule is not None and self._rule.needs_root():
            raise ValueError(
                f"method {self.method} needs a root update; use gym soup merge --root, or a hub with root data"
            )
        if self.codec.distill_steps or self.soup_codec.distill_steps:
            raise ValueError("distill_steps: a DeltaSoup has no data to distil on; use BitDeltaQuantizer")
        return self

    @model_validator(mode="after")
    def _validate_accounting(self) -> DeltaSoupConfig:
        if self.differential_privacy is None:
            return self
        if self.norm_ratio is not None:
            raise ValueError(
                "norm_ratio leaves contributions out by the norms of all, which no noise covers; with "
                "differential_privacy write norm_ratio: null (None in Python)"
            )
        _refuse_methods(self.method, self.differential_privacy)
        self.differential_privacy.refuse_unaccounted(self.recipe(1))
        return self

    def malicious_of(self, contributors: int) -> int:
        """Return the number of malicious clients to withstand among N contributors."""
        if self.num_malicious_nodes is not None:
            return self.num_malicious_nodes
        return 0 if self._rule is None else int(self._rule.default_malicious(contributors))

    @property
    def _rule(self) -> Any:
        """The aggregator's class; None for a merge method."""
        return AGGREGATORS.type_of(self.method.value) if self.method.value in AGGREGATORS else None

    def recipe(self, contributors: int) -> SoupRecipe:
        """Return the same settings as a round's recipe for N contributors, for an aggregator."""
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
            f"method {method.value!r}: what one contribution can change in it has no known bound, so no noise accounts "
            f"for it; with differential_privacy use {' or '.join(privacy.accounted())}"
        )
