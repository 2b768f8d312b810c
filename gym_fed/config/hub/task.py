"""The task of a round, as a hub sends it to contributors, and the chain of global versions that it starts from.

A contributor's agent parses tasks strictly: it refuses one with any unlisted key (a path, a command, code). Names
follow TRL and PEFT, as in ``TrainingConfig``. Each version's digest covers the version before it, the soup, and the
round that created it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from gym_fed.config.algorithms.preference import (
    DpoSettings,
    KtoSettings,
    OrpoSettings,
    SimpoSettings,
    TdpoSettings,
)
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.credits import PayTerms
from gym_fed.config.hub.privacy import LocalPrivacy, SecureTask
from gym_fed.config.hub.region import RegionConfig
from gym_fed.config.schema.base import Problem, Problems, StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.config.schema.open_keys import OpenModel
from gym_fed.config.schema.plugins import Plugins, only_recorded, read_plugins, require_plugins
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.core.text import counted

_DIGEST = r"^sha256:[0-9a-f]{64}$"
SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}$")]

RecipeAlgorithm = Annotated[str, MemberOf(ALGORITHMS, fact="federates")]
"""Algorithms that a hub may request: those that need only the contributor's own rows."""

RecipeTuning = Annotated[str, MemberOf(TUNING, fact="federates")]
"""Tuning methods that a hub may request: those whose updates are values or LoRA factors."""

SECTIONS = ("recipe", "codec")


class LoraRecipe(StrictModel):
    """LoRA settings, named as in PEFT; used only if ``finetuning`` sends LoRA factors."""

    r: int = Field(8, ge=1, le=1024)
    lora_alpha: int = Field(16, ge=1, le=4096)
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    target_modules: Annotated[list[str], Field(max_length=1000)] | Literal["all-linear"] = "all-linear"
    freeze_a: bool = False
    """Draw A at random and train only B. The seed is the recipe's plus the round's number: the same for every
    contributor of a round, and different in the next. Coordinate-wise rules are then exact on LoRA too, since their
    result on the Bs, times A, has the same rank."""


class TrainingRecipe(OpenModel):
    """Training settings that all contributors of a round share. Data, devices and folders are their own choice."""

    algorithm: RecipeAlgorithm = "sft"
    dpo: DpoSettings | None = None
    kto: KtoSettings | None = None
    orpo: OrpoSettings | None = None
    simpo: SimpoSettings | None = None
    tdpo: TdpoSettings | None = None
    finetuning: RecipeTuning = "full"
    lora: LoraRecipe = LoraRecipe()
    max_steps: int = Field(50, ge=1, le=100_000)
    learning_rate: float = Field(1e-3, gt=0, le=1)
    per_device_train_batch_size: int = Field(16, ge=1, le=4096)
    gradient_accumulation_steps: int = Field(1, ge=1, le=1024)
    max_length: int = Field(256, ge=8, le=1_000_000)
    warmup_steps: int = Field(0, ge=0)
    """Number of steps over which the learning rate rises to ``learning_rate``, under every schedule."""

    weight_decay: float = Field(0.0, ge=0, le=1)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    group_by_length: bool = False
    """Batch rows of similar length together, which reduces padding."""

    seed: int = 0
    """Seed; the round's number is added to it, so that rounds get different batches."""

    keep_optimizer_state: bool = False
    """Continue each round from the AdamW moments of the contributor's last merged round, as DiLoCo does. They
    take 8 bytes per weight on the contributor's disk, and the same again for every update without a verdict."""

    privacy: LocalPrivacy | None = None
    """DP-SGD on the contributor's machine; by default none."""

    @property
    def sends_factors(self) -> bool:
        """True if updates are LoRA factors with the settings of ``lora``, instead of values."""
        return bool(TUNING.type_of(self.finetuning).sends_factors)

    @model_serializer(mode="wrap")
    def _omit_false_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit optional keys that are False, so that a recipe without them keeps its digest."""
        data: dict[str, Any] = handler(self)
        for key in ("group_by_length", "keep_optimizer_state"):
            if not data.get(key):
                data.pop(key, None)
        return data

    @model_validator(mode="after")
    def _validate_recipe(self) -> TrainingRecipe:
        if self.group_by_length and self.privacy is not None:
            raise ValueError("group_by_length: with privacy, batches would depend on the rows; remove it")
        if self.group_by_length and ALGORITHMS.type_of(self.algorithm).orders_rows:
            raise ValueError(f"group_by_length: {self.algorithm} determines the order of its rows; remove it")
        if self.keep_optimizer_state and self.sends_factors:
            raise ValueError(
                f"keep_optimizer_state: {self.finetuning} trains new factors every round, whose moments are useless "
                "in the next round; remove it, or set finetuning: full"
            )
        if self.keep_optimizer_state and self.privacy is not None:
            raise ValueError("keep_optimizer_state: DP-SGD has its own optimiser; remove it, or privacy")
        if self.privacy is not None and not ALGORITHMS.type_of(self.algorithm).per_example:
            those = " or ".join(ALGORITHMS.own_with("per_example"))
            raise ValueError(f"privacy: no accounting for {self.algorithm}; use {those}, or remove it")
        chosen = self.chosen_sections().get(self.algorithm)
        if chosen is None:
            return self
        min_batch = ALGORITHMS.type_of(self.algorithm).least_batch(chosen)
        if self.per_device_train_batch_size < min_batch:
            raise ValueError(
                f"per_device_train_batch_size: {self.algorithm} needs batches of at least "
                f"{counted(min_batch, 'row')}"
            )
        disables_dropout = getattr(chosen, "disable_dropout", False)
        if disables_dropout and self.lora.lora_dropout and self.sends_factors:
            raise ValueError(
                f"lora.lora_dropout: {self.algorithm} switches dropout off; remove it, or set "
                f"{self.algorithm}.disable_dropout: false"
            )
        return self


class SoupReference(StrictModel):
    """A committed soup: the object to fetch, and the resulting version."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=1)
    version_digest: str = Field(pattern=_DIGEST)
    server_round: int = Field(ge=1)
    """Round that created the version; the version's digest depends on it."""
    integers: str | None = Field(None, pattern=_DIGEST)
    """Digest of the sum of the soups up to this one, if they can be added as integers
    (``gym_fed.delta.integer_sum``); the version's digest depends on it."""
    sum_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The object with that sum; present only for the last soup."""
    sum_bytes: int | None = Field(None, ge=1)

    @model_serializer(mode="wrap")
    def _omit_absent_sum(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the keys of the sum if they are None, as for soups that cannot be added as integers."""
        return {key: value for key, value in handler(self).items() if value is not None}

    @model_validator(mode="after")
    def _validate_sum(self) -> SoupReference:
        if (self.sum_sha256 is None) != (self.sum_bytes is None) or (self.sum_sha256 and not self.integers):
            raise ValueError("sum_sha256, sum_bytes and integers belong together")
        return self


class TaskSpec(StrictModel):
    """Everything that a contributor needs for one round."""

    format: Literal["gym-task-1"] = "gym-task-1"
    server: str = Field(pattern=r"^s[0-9a-f]{16}$")
    """Id of the hub, derived from the key that signs its ledger."""
    server_round: int = Field(ge=1)
    base_model: str = Field(max_length=256)
    """Display name of the base, which is identified by its digest."""
    base_digest: str = Field(pattern=_DIGEST)
    version_digest: str = Field(pattern=_DIGEST)
    """Global version to start from; equal to ``base_digest`` if ``soups`` is empty."""
    soups: list[SoupReference] = Field(default_factory=list, max_length=100_000)
    recipe: TrainingRecipe = TrainingRecipe()
    codec: CodecPolicy = CodecPolicy()
    max_update_bytes: int = Field(ge=1)
    deadline_seconds: float = Field(gt=0)
    """Unix time after which the round no longer waits."""
    pay: PayTerms | None = None
    """Pay of the round, fixed even if the hub's config changes later."""

    secure_aggregation: SecureTask | None = None
    """Send masked votes, so that the hub learns only their sum; by default, the update itself is sent."""

    evaluated_on: dict[SuiteName, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(
        default_factory=dict, max_length=16
    )
    """Suites of the hub's gate with digests of their tasks and rows, on which nobody may train."""

    audit: AuditTerms | None = None
    """Audits of the round's updates; by default none."""

    region: RegionConfig | None = None
    """The hub that receives the merged round; by default none."""

    plugins: Plugins = Field(default_factory=list)
    """Plug-ins that the round needs, with the hub's versions; a contributor without them refuses the task."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate_plugins(cls, values: Any, read: ModelWrapValidatorHandler[Any]) -> Any:
        """Require the recorded plug-ins before anything else is read, and import no others."""
        named = values.get("plugins") if isinstance(values, dict) else None
        recorded = read_plugins(named) if named else []
        require_plugins(recorded, "the task")
        with only_recorded(recorded, "the task"):
            return read(values)

    @model_serializer(mode="wrap")
    def _omit_empty_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the keys of plug-ins, evaluations, audits, pay and region if they are empty."""
        data: dict[str, Any] = handler(self)
        for key in ("plugins", "evaluated_on", "audit", "pay", "region"):
            if not data.get(key):
                data.pop(key, None)
        return data

    @model_validator(mode="after")
    def _validate_task(self) -> TaskSpec:
        check_distillation(self.recipe, self.codec)
        check_frozen_a(self.recipe, self.codec)
        end = self.soups[-1].version_digest if self.soups else self.base_digest
        if end != self.version_digest:
            raise ValueError(f"the soups end at {end}, not at version_digest {self.version_digest}")
        if self.soups and self.soups[-1].integers and not self.soups[-1].sum_sha256:
            raise ValueError("the last soup has integers but no sum_sha256")
        if self.audit is not None and not self.recipe.sends_factors:
            raise ValueError("audit: only LoRA updates are audited, but recipe.finetuning is not lora")
        return self


def check_distillation(recipe: TrainingRecipe, codec: CodecPolicy) -> None:
    """Raise ``Problems`` if the codec's distillation has no values to train or would bypass the noise."""
    problems = []
    if codec.distill_steps and recipe.privacy is not None:
        text = ": distillation uses the data without noise, but recipe.privacy is set; use 0 steps"
        problems.append(Problem("codec.distill_steps", text))
    if codec.distill_steps and recipe.sends_factors:
        text = f"is for full deltas; set it to 0 with recipe.finetuning: {recipe.finetuning}"
        problems.append(Problem("codec.distill_steps", text))
    if problems:
        raise Problems("", problems)


def check_frozen_a(recipe: TrainingRecipe, codec: CodecPolicy) -> None:
    """Raise ``Problems`` if the codec would not preserve the shared A of all contributors."""
    if recipe.sends_factors and recipe.lora.freeze_a and codec.quantises_factors:
        text = (
            f"needs the trained factors, but codec.factors is {codec.factors!r}, which writes different factors "
            "with the same product; set codec.factors to bfloat16 or float32"
        )
        raise Problems("", [Problem("recipe.lora.freeze_a", text)])


def next_digest(parent: str, soup_sha256: str, server_round: int, integers: str | None = None) -> str:
    """Return the digest of the version after a soup; digests form a chain that covers all earlier soups.

    ``integers`` is the digest of the sum of the soups, if they can be added as integers.
    """
    made = {"parent": parent, "soup": soup_sha256, "server_round": server_round}
    return "sha256:" + canonical_digest(made if integers is None else {**made, "integers": integers})


def first_summed(soups: Sequence[SoupReference]) -> int:
    """Return the start of the trailing run of soups that can be added as integers; ``len(soups)`` if there is none."""
    start = len(soups)
    while start and soups[start - 1].integers is not None:
        start -= 1
    return start


def bytes_to_join(soups: Sequence[SoupReference]) -> int:
    """Return the download size of a version for a contributor who has only the base."""
    start = first_summed(soups)
    return sum(soup.size_bytes for soup in soups[:start]) + (
        (soups[-1].sum_bytes or 0) if soups[start:] else 0
    )


def check_lineage(spec: TaskSpec) -> None:
    """Refuse a task whose versions do not follow from its base and soups.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first version that does not follow.
    """
    parent, last_round = spec.base_digest, 0
    for height, soup in enumerate(spec.soups, 1):
        digest = next_digest(parent, soup.sha256, soup.server_round, soup.integers)
        if not last_round < soup.server_round < spec.server_round or digest != soup.version_digest:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"version {height} of the task ({soup.version_digest}) does not follow from the one before it and soup "
                f"{soup.sha256[:16]}...",
                "the hub's versions do not follow from its own soups: ask its coordinator to run `gym-server "
                "ledger verify`",
            )
        parent, last_round = soup.version_digest, soup.server_round


def recipe_values(recipe: TrainingRecipe, codec: CodecPolicy) -> dict[str, Any]:
    """Return all values by dotted key, such as ``recipe.lora.r``; lists are values."""
    values: dict[str, Any] = {}
    for section, model in zip(SECTIONS, (recipe, codec), strict=True):
        _flatten(section, model.model_dump(mode="json"), values)
    return values


def _flatten(key: str, value: Any, values: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{key}.{name}", inner, values)
    else:
        values[key] = value
