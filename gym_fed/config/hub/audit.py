"""Settings of audits: an auditor repeats single training steps of an update and compares the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from gym_fed.config.schema.base import Problem, Problems, StrictModel
from gym_fed.core.registries import ALGORITHMS

if TYPE_CHECKING:
    from gym_fed.config.hub.sections import ServerSections

_MAX_STEPS = 10_000
"""Maximum steps of an audited training: the draw costs a hash for each when the ledger is verified."""


class AuditTerms(StrictModel):
    """The part of the audit settings that a contributor agrees to; every task of the hub contains it."""

    rows: Literal["public", "disclosed"]
    """Whose rows can be audited: ``public`` rows, which the auditor has as well, or rows that the contributor agrees to
    send to the auditor (``disclosed``). Private rows cannot be audited."""
    rate: float = Field(0.1, gt=0, le=1)
    """Fraction of a round's updates that are drawn."""
    steps: int = Field(2, ge=1, le=64)
    """Number of training steps that are repeated of each drawn update."""
    tolerance: float = Field(1e-3, gt=0, le=0.1)
    """Maximum difference between a repeated step and the contributor's, as a fraction of the step."""
    answer_seconds: float = Field(7 * 86400, ge=60)
    """Time that a contributor of a drawn update has to answer, and keeps the states of its training."""

    def values_by_key(self) -> dict[str, Any]:
        """Return every value by its dotted key, such as ``audit.rate``."""
        return {f"audit.{key}": value for key, value in self.model_dump(mode="json").items()}

    def in_words(self) -> str:
        """Describe the terms in one line."""
        which = "which must be public" if self.rows == "public" else "which you then disclose"
        return (
            f"{self.rate:.0%} of the updates are drawn; for yours, an auditor gets your rows ({which}) and the states "
            f"around {self.steps} training steps, and repeats these"
        )


class AuditConfig(AuditTerms):
    """Audits of LoRA updates; by default none. The contributors' rows must be public, or disclosed to the auditors."""

    auditors: list[str] = Field(min_length=1, max_length=64)
    """Ids of the accounts whose signed verdicts the hub records; ``gym-client id`` prints them."""

    def terms(self) -> AuditTerms:
        """Return the part that a contributor agrees to."""
        return AuditTerms(**self.model_dump(exclude={"auditors"}))


def check_audit(config: ServerSections) -> None:
    """Raise ``Problems`` with every key that makes a step impossible to repeat, or shows what must stay hidden."""
    if config.rounds.audit is not None and (problems := list(_problems(config, config.rounds.audit))):
        raise Problems("rounds.audit", problems)


def _problems(config: ServerSections, audit: AuditConfig) -> Iterator[Problem]:
    recipe = config.recipe
    if not recipe.sends_factors:
        yield Problem(
            "recipe.finetuning",
            "audits repeat steps of LoRA, whose states are small; set finetuning: lora, or remove rounds.audit",
        )
    if not ALGORITHMS.type_of(recipe.algorithm).per_example:
        yield Problem(
            "recipe.algorithm", f"{recipe.algorithm} cannot be audited; use sft, or remove rounds.audit"
        )
    if recipe.lora.lora_dropout:
        yield Problem(
            "recipe.lora.lora_dropout", "draws numbers that another machine cannot repeat; set it to 0"
        )
    if config.codec.quantises_factors:
        yield Problem(
            "codec.factors",
            f"{config.codec.factors!r} loses more than an audit tolerates; set it to bfloat16 or float32",
        )
    if recipe.max_steps > _MAX_STEPS:
        yield Problem("recipe.max_steps", f"{recipe.max_steps} is too large for audits; at most {_MAX_STEPS}")
    if audit.steps > recipe.max_steps:
        yield Problem(
            "rounds.audit.steps", f"{audit.steps} is more than recipe.max_steps, {recipe.max_steps}"
        )
    for key in ("privacy", "secure_aggregation"):
        if getattr(config, key) is not None:
            yield Problem(key, "hides updates, and an audit shows them; remove it, or rounds.audit")
    if recipe.privacy is not None:
        yield Problem("recipe.privacy", "protects rows that an audit discloses; remove it, or rounds.audit")
