"""The schema of the hub's YAML file, which refuses combinations that reveal single updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import field_validator, model_validator

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import MAX_AUDITED_STEPS, AuditConfig
from gym_fed.config.hub.continuous import check_continuous
from gym_fed.config.hub.sections import ServerSections
from gym_fed.config.hub.seeding import check_seeding
from gym_fed.config.hub.task import TrainingRecipe, check_distillation, check_frozen_a
from gym_fed.config.schema.base import Problem, Problems
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.core.errors import GymError
from gym_fed.core.registries import AGGREGATORS, ALGORITHMS

CONFIG_NAME = "gym-server.yaml"
"""Name of the config file in a hub's folder."""

_DELTA_BYTES_PER_WEIGHT = 8
"""Maximum bytes per weight over all codecs: dense float32 needs 4, masked votes at most 8."""

_DELTA_BYTES_PER_TENSOR = 1 << 10
_DELTA_HEADER_BYTES = 1 << 20


class ServerConfig(ServerSections):
    """The validated config of ``gym-server.yaml``."""

    @property
    def public_base_name(self) -> str:
        """The base model's name without the folders of the hub's machine."""
        return Path(self.base_model).name

    @property
    def hides_updates(self) -> bool:
        """True if single updates must stay hidden."""
        return self.privacy is not None or self.secure_aggregation is not None

    @property
    def draws_by_seed(self) -> bool:
        """True if rounds commit to a secret seed that draws evaluation rows and audited steps."""
        return bool(self.gate.evals) or self.rounds.audit is not None

    def max_update_bytes(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the size limit of an update, in bytes.

        Args:
            shapes: Shapes of the base's tensors, by name.

        Returns:
            The minimum of ``admission.max_update_bytes``, ``limits.unreferenced_bytes_per_account``, and the largest
            size of the base's weights in any codec.
        """
        weights = sum(math.prod(shape) for shape in shapes.values())
        largest = (
            _DELTA_HEADER_BYTES + _DELTA_BYTES_PER_TENSOR * len(shapes) + _DELTA_BYTES_PER_WEIGHT * weights
        )
        return min(self.admission.max_update_bytes, self.limits.unreferenced_bytes_per_account, largest)

    def max_variant_bytes(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the size limit of a variant, in bytes."""
        limit = self.max_update_bytes(shapes)
        return limit if self.variants.max_bytes is None else min(limit, self.variants.max_bytes)

    def recipe_at(self, num_soups: int) -> TrainingRecipe:
        """Return the recipe of the round that starts from the version after N soups."""
        rate = self.recipe.learning_rate * self.rounds.learning_rate_decay**num_soups
        return self.recipe.model_copy(update={"learning_rate": rate})

    @model_validator(mode="after")
    def _default_rule(self) -> ServerConfig:
        """Set the rule unless ``soup.aggregator`` is set.

        With ``privacy``, it is the accounted rule with the highest accuracy under attack; otherwise
        ``byzantine_evidence`` if ``root`` has clean rows.
        """
        if "aggregator" in self.soup.model_fields_set:
            return self
        rule = None
        if self.privacy is not None:
            rule = self.privacy.best_rule(has_root=self.root is not None)
        elif self.root is not None and not self.hides_updates:
            rule = "byzantine_evidence"
        if rule is not None:
            soup = self.soup.model_copy(update={"aggregator": rule})
            object.__setattr__(self, "soup", soup)
        return self

    @model_validator(mode="after")
    def _default_soup_codec(self) -> ServerConfig:
        """Set the soup's codec unless it is given: LoRA factors as merged, and a lattice for full fine-tuning."""
        if "codec" not in self.soup.model_fields_set:
            if self.recipe.sends_factors:
                policy = CodecPolicy(codec="as-merged")
            else:
                policy = CodecPolicy.model_construct(codec="lattice")  # validation would import torch
            soup = self.soup.model_copy(update={"codec": policy})
            object.__setattr__(self, "soup", soup)  # the model is frozen for everyone else
        return self

    @field_validator("listen")
    @classmethod
    def _validate_listen(cls, text: str) -> str:
        Endpoint.parse(text, least_port=0)
        return text

    @field_validator("advertise")
    @classmethod
    def _validate_public_address(cls, text: str | None) -> str | None:
        if text is not None and Endpoint.parse(text).is_everywhere:
            raise ValueError(f"nobody can connect to {text}; give the host name that contributors use")
        return text

    @model_validator(mode="after")
    def _validate_sections(self) -> ServerConfig:
        gate = self.gate
        self.rewards.check_gate(gate.heldout is not None, bool(gate.evals))
        if self.root is not None and self.root.data == self.gate.heldout and "task:" not in self.root.data:
            text = "is the gate's held-out set, which must not be trained on"
            raise Problems("", [Problem("root.data", text)])
        limit = self.admission.max_update_bytes
        if (self.variants.max_bytes or 0) > limit:
            text = f"is above admission.max_update_bytes ({limit}), the limit of every upload"
            raise Problems("", [Problem("variants.max_bytes", text)])
        hiding = (key for key in ("privacy", "secure_aggregation") if getattr(self, key) is not None)
        check_seeding(self.seeding, next(hiding, ""))
        check_continuous(self)
        check_audit(self)
        check_secure(self)
        check_private(self)
        check_region(self)
        check_distillation(self.recipe, self.codec)
        check_frozen_a(self.recipe, self.codec)
        if self.codec.codec == "as-merged" or self.codec.adds_up:
            text = f"is {self.codec.codec!r}, which is only for soups; choose a codec for updates"
            raise Problems("", [Problem("codec.codec", text)])
        if problems := list(_about_sparse(self)):
            raise Problems("", problems)
        if self.soup.codec.distill_steps:
            text = ": a hub has no contributor's text to distil on; set it to 0"
            raise Problems("", [Problem("soup.codec.distill_steps", text)])
        if self.rounds.mode == "continuous":
            return self  # num_malicious_nodes applies to the window; rounds wait until it is large enough
        try:
            self.soup.check_feasible(self.rounds.min_contributors)
        except GymError as error:
            raise Problems("", [Problem("soup", f"and rounds.min_contributors: {error}")]) from error
        return self


def wanted_participants(config: ServerSections) -> int:
    """Return the number of contributors that a secure round waits for before keys are shared."""
    secure = config.secure_aggregation
    assert secure is not None
    return secure.begin_with or needed_survivors(config)


def needed_survivors(config: ServerSections) -> int:
    """Return the number of contributors that must stay until the end."""
    secure = config.secure_aggregation
    assert secure is not None
    return max(secure.threshold, config.rounds.min_contributors)


def _about_sparse(config: ServerSections) -> Iterator[Problem]:
    """Yield the settings that do not work with sparse updates, which leave out most weights."""
    if not (codecs := config.codec.sparse_codecs):
        return
    codec = " and ".join(repr(name) for name in codecs)
    if AGGREGATORS.type_of(config.soup.aggregator).coordinate_wise:
        yield Problem(
            "soup.aggregator",
            f"{config.soup.aggregator!r} decides coordinate by coordinate, and updates of codec {codec} leave out most "
            "of them, so that the soup would be zero; use byzantine_robust, or another rule that weighs whole updates",
        )
    if config.recipe.sends_factors:
        yield Problem(
            "codec",
            f"{codec} is for full updates, not for LoRA factors; remove it, or set recipe.finetuning: full",
        )
    by_votes = config.privacy is not None and config.privacy.mechanism == "discrete_gaussian"
    if by_votes or config.secure_aggregation is not None:
        yield Problem("codec", f"{codec} leaves out most weights, whose votes would be 0; use bitdelta")


def check_private(config: ServerSections) -> None:
    """Raise ``Problems`` with every key that conflicts with ``privacy`` by revealing an update despite the noise."""
    if config.privacy is None:
        return
    problems = list(_problems(config))
    if problems:
        raise Problems("privacy", problems)


def _problems(config: ServerSections) -> Iterator[Problem]:
    if config.admission.norm_ratio is not None:
        yield Problem(
            "admission.norm_ratio",
            "rejects an update by the norms of all updates, and rejections are visible; write admission: "
            "{norm_ratio: null} (privacy.clipping_norm limits the effect of one update)",
        )
    if config.admission.max_norm is not None:
        yield Problem("admission.max_norm", "refuses by an update's norm; write admission: {max_norm: null}")
    if config.gate.screen_updates:
        yield Problem(
            "gate.screen_updates",
            "rejects single updates by their effect on the held-out loss; write gate: {screen_updates: false} (the "
            "gate still tests the noised soup)",
        )
    rule = AGGREGATORS.type_of(config.soup.aggregator)
    if config.root is not None and not (rule.bounds_one and rule.needs_root()):
        yield Problem(
            "root",
            f"{config.soup.aggregator} does not judge each update against the root update separately; remove it, or "
            "write soup: {aggregator: root_gate}, which does",
        )
    if config.recipe.sends_factors and not config.recipe.lora.freeze_a:
        yield Problem(
            "recipe.finetuning",
            "lora trains two factors, whose noise would be multiplied; write recipe: {lora: {freeze_a: "
            "true}}, or finetuning: full",
        )
    yield from config.rewards.looks_into_updates("privacy")
    assert config.privacy is not None
    yield from config.privacy.unaccounted(config.soup)


def check_secure(config: ServerSections) -> None:
    """Raise ``Problems`` with every key that conflicts with ``secure_aggregation``."""
    if config.secure_aggregation is None:
        return
    problems = [*_about_rounds(config), *_about_updates(config), *_about_soup(config)]
    if problems:
        raise Problems("secure_aggregation", problems)


def _about_rounds(config: ServerSections) -> Iterator[Problem]:
    secure = config.secure_aggregation
    assert secure is not None
    begin, stay = wanted_participants(config), needed_survivors(config)
    if begin < stay:
        yield Problem(
            "secure_aggregation.begin_with",
            f"{begin} is below {stay}, the minimum at the end of a round; raise it, by one for each contributor that "
            "may drop out",
        )
    if 2 * secure.threshold <= begin:
        yield Problem(
            "secure_aggregation.threshold",
            f"{secure.threshold} is not more than half of the {begin} contributors that begin a round, so a hub could "
            f"show each half different participants; set it to at least {begin // 2 + 1}",
        )
    if config.privacy is None and secure.step_norm is None:
        yield Problem(
            "secure_aggregation.step_norm",
            "is missing: it sets how far a sign vote moves the model",
        )
    if config.privacy is not None and secure.step_norm is not None:
        yield Problem(
            "secure_aggregation.step_norm", "has no effect, since privacy.clipping_norm is used; remove it"
        )
    if config.privacy is not None and config.privacy.mechanism != "discrete_gaussian":
        yield Problem(
            "privacy.mechanism", "clips floats that the hub does not see; set it to discrete_gaussian"
        )


def _about_updates(config: ServerSections) -> Iterator[Problem]:
    if config.recipe.sends_factors:
        yield Problem(
            "recipe.finetuning",
            "lora: signs of a product of factors are not a product of factors; set finetuning: full",
        )
    if config.admission.max_norm is not None:
        yield Problem("admission.max_norm", "measures single updates; set it to null")
    if config.admission.norm_ratio is not None:
        yield Problem("admission.norm_ratio", "compares single updates; set it to null")
    if config.gate.screen_updates:
        yield Problem(
            "gate.screen_updates", "tests single updates; set it to false (the gate still tests the soup)"
        )
    if config.root is not None:
        yield Problem("root", "judges single updates; remove it")
    yield from config.rewards.looks_into_updates("secure_aggregation")


def _about_soup(config: ServerSections) -> Iterator[Problem]:
    soup = config.soup
    if not AGGREGATORS.type_of(soup.aggregator).counts_votes:
        yield Problem(
            "soup.aggregator",
            f"{soup.aggregator!r} is not a function of the sum; use "
            f"{' or '.join(AGGREGATORS.own_with('counts_votes'))}",
        )
    if soup.pre_aggregators:
        yield Problem("soup.pre_aggregators", "compare single updates; remove them")
    if soup.max_norm is not None:
        yield Problem("soup.max_norm", "clips single updates, and votes all have one norm; remove it")
    if soup.weighting != "uniform":
        yield Problem("soup.weighting", f"{soup.weighting!r} scales single updates; set it to uniform")
    if soup.num_malicious_nodes:
        yield Problem(
            "soup.num_malicious_nodes",
            ": masked updates cannot be checked, so one malicious client can change the sum arbitrarily; set it to 0",
        )


def check_region(config: ServerSections) -> None:
    """Raise ``Problems`` with every key that conflicts with ``region``, which adopts whole versions of its root."""
    if config.region is not None and (problems := list(_about_regions(config))):
        raise Problems("region", problems)


def _about_regions(config: ServerSections) -> Iterator[Problem]:
    if config.recipe.sends_factors or not config.soup.codec.adds_up:
        yield Problem(
            "soup.codec",
            "must add up as integers, so that the root's versions are reproduced exactly; set recipe.finetuning: full "
            "and soup.codec: {codec: lattice}",
        )
    if config.rounds.mode == "continuous":
        yield Problem("rounds.mode", "'continuous' accepts updates of older versions; set it to synchronous")
    if config.soup.server_optimizer != "none":
        yield Problem(
            "soup.server_optimizer",
            f"{config.soup.server_optimizer!r} keeps state across versions, which the root replaces; set it to none",
        )
    if config.privacy is not None and not config.privacy.end_when_spent:
        yield Problem(
            "privacy.end_when_spent", "is false, and the number of rounds depends on the root; set it to true"
        )


def check_audit(config: ServerSections) -> None:
    """Raise ``Problems`` with every key that prevents steps from being repeated, or reveals hidden updates."""
    if config.rounds.audit is not None and (problems := list(_about_audits(config, config.rounds.audit))):
        raise Problems("rounds.audit", problems)


def _about_audits(config: ServerSections, audit: AuditConfig) -> Iterator[Problem]:
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
            "recipe.lora.lora_dropout",
            "uses random numbers that another machine cannot reproduce; set it to 0",
        )
    if config.codec.quantises_factors:
        yield Problem(
            "codec.factors",
            f"{config.codec.factors!r} loses more than an audit tolerates; set it to bfloat16 or float32",
        )
    if recipe.max_steps > MAX_AUDITED_STEPS:
        yield Problem(
            "recipe.max_steps", f"{recipe.max_steps} is too large for audits; at most {MAX_AUDITED_STEPS}"
        )
    if audit.steps > recipe.max_steps:
        yield Problem(
            "rounds.audit.steps", f"{audit.steps} is more than recipe.max_steps, {recipe.max_steps}"
        )
    for key in ("privacy", "secure_aggregation"):
        if getattr(config, key) is not None:
            yield Problem(key, "hides updates, but an audit shows them; remove it, or rounds.audit")
    if recipe.privacy is not None:
        yield Problem(
            "recipe.privacy", "protects rows, but an audit discloses them; remove it, or rounds.audit"
        )
