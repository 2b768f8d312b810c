"""Settings of rewards: scores, free-riding, reputation, the split of a round's pool, and the announced terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gym_fed.config.hub.soup import Option
from gym_fed.config.schema.base import Problem, Problems, StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import CONTRIBUTIONS
from gym_fed.core.text import counted

# Sums of credits stay within 53 bits, which every JSON reader and database can represent exactly.
MAX_AMOUNT = 10**9
"""Maximum credits of one round, or of one usage report."""

MAX_ROYALTIES = 2**52
"""Maximum credits of all usage reports; with those of four million rounds, the sum still fits in 53 bits."""

ScoreMethod = Annotated[str, MemberOf(CONTRIBUTIONS)]
"""Name of a contribution method: a file in ``gym_fed/soup/contributions``, or a member of an installed package."""

ScoreOptions = Annotated[dict[Annotated[str, Field(max_length=64)], Option], Field(max_length=32)]

_DEFAULT_QUALITY = 0.8

_COMPARING_KEYS = ("similarity_threshold", "together_threshold", "stale_threshold", "min_norm_ratio")
"""Keys of settings that compare single updates; they must be off if updates are hidden."""
Cosine = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(ge=0, le=1)]
StaleRounds = Annotated[int, Field(ge=1, le=100)]


class ReputationConfig(StrictModel):
    """Changes of a contributor's reputation, in [0, 1], per committed round; a new account starts at 0."""

    up: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Increase after a round with a positive contribution, as a fraction of the distance to 1: r += up (1 - r)."""

    absence: Factor = 0.98
    """Factor for a round without an update from the contributor."""

    rejected: Factor = 0.5
    """Factor for an update that a screen rejects (norm, held-out loss)."""

    cheating: Factor = 0.0
    """Factor for proven cheating: resending others' merged work, or an A other than the round's."""


class PayTerms(StrictModel):
    """The pay of a round: every key of ``rewards`` that decides what a contributor earns."""

    pool: int = Field(ge=0, le=MAX_AMOUNT)
    score: str = Field(max_length=120)
    score_options: ScoreOptions = Field(default_factory=dict)
    quality_weight: float = Field(ge=0, le=1)
    credits_per_nat: float = Field(gt=0, le=MAX_AMOUNT)
    participation_ramp: bool
    score_on: Literal["loss", "evals"] = "loss"
    evals_share: float = Field(ge=0, le=1)
    min_norm_ratio: Factor
    similarity_threshold: Cosine | None
    together_threshold: Cosine | None
    stale_threshold: Cosine | None
    stale_rounds: StaleRounds
    reputation: ReputationConfig

    def values_by_key(self) -> dict[str, Any]:
        """Return all values by dotted key, such as ``pay.pool`` or ``pay.reputation.up``."""
        values = self.model_dump(mode="json")
        changes = values.pop("reputation")
        values |= {f"reputation.{key}": value for key, value in changes.items()}
        return {f"pay.{key}": value for key, value in values.items()}

    def in_words(self) -> str:
        """Describe the terms in one line."""
        pool = f"{counted(self.pool, 'credit')} a round"
        if self.quality_weight == 0.0:
            return f"{pool}, shared by all merged; contributions are not measured"
        evals = self.evals_share if self.score_on == "evals" else 0.0
        scored, rest = (1 - evals) * self.quality_weight, (1 - evals) * (1 - self.quality_weight)
        parts = [f"{scored:.0%} by {self.score}"]
        parts += [f"{evals:.0%} by evaluations"] if evals else []
        parts += [f"{rest:.0%} to all merged"] if rest else []
        return f"up to {pool}, {self.credits_per_nat:,.0f} per nat gained: {', '.join(parts)}"

    def details(self) -> str:
        """Describe what a gain is and when it is paid; empty if contributions are not measured."""
        if self.quality_weight == 0.0:
            return ""
        start = "" if self.together_threshold is None else ", paid from your second update on"
        return f"a gain is less held-out loss{start}"


class RewardsConfig(StrictModel):
    """The pay of a committed round, and its split."""

    pool: int = Field(1000, ge=0, le=MAX_AMOUNT)
    """Credits paid per round."""

    score: ScoreMethod = "participation"
    """Measure of an update's contribution. ``participation``: none; the pool is split among all merged updates.
    ``improvement``: the decrease of held-out loss by the update alone, at its share of the soup. The others divide the
    improvement of the whole soup (docs/contributions.md), or come from installed packages. All but the first need
    ``gate.heldout``, with which `gym-server init` chooses ``estimate``."""

    score_options: ScoreOptions = Field(default_factory=dict)
    """Further settings of the method (its ``Config``); ``budget`` limits the evaluations of sampling methods."""

    quality_weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the pool paid by score. By default 0 for ``participation``, 0.8 for other scores, or what
    ``participation_weight`` leaves."""

    participation_weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the pool split among all merged contributors. By default the rest."""

    score_on: Literal["loss", "evals"] = "loss"
    """``evals``: part of the pool is split by each update's gain on the metrics of ``gate.evals``, measured against
    the soup without it; the rest is split by ``score``, on held-out loss."""

    evals_share: Factor = 0.2
    """Share paid by evaluations, with ``score_on: evals``: of the price of the round's gain, or of the pool if
    no gain is measured. If no update improves them, it stays in the pool, or is split like the rest."""

    credits_per_nat: float = Field(10_000, gt=0, le=MAX_AMOUNT)
    """Price of one nat per token of held-out loss. All rounds together pay by score at most this much for gains at 95%
    confidence; the remainder stays in the pool for later rounds. The default pays a pool of 1,000 for a tenth of a
    nat."""

    participation_ramp: bool = True
    """Split the participation part by reputation before the round, at least a tenth of the highest. ``false``:
    split it equally."""

    min_norm_ratio: Factor = 0.01
    """Fraction of the round's median norm (with two updates: of the smaller) below which an update counts as zeros
    and is rejected."""

    similarity_threshold: Cosine | None = 0.9
    """Cosine (of whole updates, of single tensors, or of signs) from which two updates of a round count as the same
    work: the first is merged, and all share one pay. docs/rewards.md has measurements. Null: only equal bytes are
    detected."""

    together_threshold: Cosine | None = 0.6
    """Updates whose cosine exceeds the round's background b (the median cosine of its pairs) by this much, as (cosine -
    b) / (1 - b), are merged and paid as one. So are updates that share no weights while both leave many out. Null:
    everyone is paid separately."""

    stale_threshold: Cosine | None = 0.999
    """Cosine from which an update is rejected as a copy of another contributor's earlier merged update, or of a
    soup. It is accepted if honest work on the same rows is nearly as similar: the authors' own updates of different
    rounds, or the sender's own from before (docs/rewards.md). Contributors' own merged updates are detected only if
    nothing but scale and codec changed, and cost no reputation. Null: no check."""

    stale_rounds: StaleRounds = 3
    """Number of earlier rounds that ``stale_threshold`` compares with."""

    reputation: ReputationConfig = ReputationConfig()

    hold_seconds: float = Field(7 * 24 * 3600, ge=0)
    """Age at which credits become transferable; a transfer settles when it and the sender's key have this age.
    Until then, revoking a stolen key undoes its transfers."""

    def terms(self) -> PayTerms:
        """Return the pay terms that contributors agree to."""
        same = {key: getattr(self, key) for key in PayTerms.model_fields if key != "quality_weight"}
        return PayTerms(quality_weight=self.weights[0], **same)

    def under(self, terms: PayTerms | None) -> RewardsConfig:
        """Return this config with the pay of ``terms``; unchanged for None."""
        if terms is None:
            return self
        announced = {key: getattr(terms, key) for key in PayTerms.model_fields}
        return self.model_copy(update={**announced, "participation_weight": None})

    @property
    def measures(self) -> bool:
        """True if scores are measured on held-out data."""
        return bool(CONTRIBUTIONS.type_of(self.score).measures)

    @property
    def weights(self) -> tuple[float, float]:
        """The shares of the pool for quality and for participation; they sum to 1."""
        if self.quality_weight is not None:
            return self.quality_weight, 1.0 - self.quality_weight
        if self.participation_weight is not None:
            return 1.0 - self.participation_weight, self.participation_weight
        return (_DEFAULT_QUALITY, 1.0 - _DEFAULT_QUALITY) if self.measures else (0.0, 1.0)

    @model_validator(mode="after")
    def _validate_weights(self) -> RewardsConfig:
        quality, participation = self.quality_weight, self.participation_weight
        if quality is not None and participation is not None and abs(quality + participation - 1.0) > 1e-9:
            raise ValueError(
                f"quality_weight {quality:g} and participation_weight {participation:g} do not sum to 1; leave one out"
            )
        if (quality, participation) != (None, None) and not self.measures and self.weights[0] > 0:
            raise ValueError(
                f"quality_weight: score {self.score} measures no quality; set it to 0, or choose a score such as "
                "estimate"
            )
        if self.measures and self.weights[0] == 0.0:
            raise ValueError(
                f"quality_weight: 0 pays nothing by score {self.score}, and participation is paid from the gain; "
                "use score: participation"
            )
        if self.score_options and not CONTRIBUTIONS.type_of(self.score).Config.model_fields:
            raise ValueError(f"score_options: score {self.score!r} has no options")
        return self

    def check_gate(self, heldout: bool, evaluates: bool) -> None:
        """Raise ``Problems`` if the gate lacks the data that the score needs."""
        problems = []
        if self.measures and not heldout:
            problems.append(
                Problem("rewards.score", f"{self.score!r} is measured on held-out data; set gate.heldout")
            )
        if self.score_on == "evals" and not evaluates:
            problems.append(Problem("rewards.score_on", "'evals' is measured on evaluations; set gate.evals"))
        if problems:
            raise Problems("", problems)

    def looks_into_updates(self, section: str) -> Iterator[Problem]:
        """Yield the settings that read single updates and therefore conflict with ``section``."""
        if self.measures:
            yield Problem(
                "rewards.score",
                f"{self.score!r} needs single updates, which {section} hides; write rewards: {{score: "
                "participation}",
            )
        if self.score_on == "evals":
            yield Problem(
                "rewards.score_on", f"'evals' needs single updates, which {section} hides; write loss"
            )
        for key in _COMPARING_KEYS:
            if getattr(self, key):
                yield Problem(
                    f"rewards.{key}",
                    "compares updates with each other, and the list of rejected ones would reveal them; write rewards: "
                    f"{{{key}: {'0' if key == 'min_norm_ratio' else 'null'}}}",
                )
