"""The contributor's limits on a hub's tasks, from ``policy.yaml`` in the home; all keys are optional."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from gym_client.observe.policy import ObservePolicy
from gym_client.seeding.policy import SeedingPolicy
from gym_fed.config.hub.task import RecipeAlgorithm, RecipeTuning, TaskSpec, TrainingRecipe, bytes_to_join
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.core.text import counted

_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_HOURS = re.compile(f"{_TIME}-(?:{_TIME}|24:00)", re.ASCII)


class Policy(StrictModel):
    """Limits that are checked before anything is fetched or trained."""

    max_steps: int = Field(default=2_000, ge=1)
    """Maximum optimiser steps in one round."""

    max_tokens_per_step: int = Field(default=1 << 20, ge=1)
    """Maximum tokens in one step: batch size x accumulation x length."""

    max_length: int = Field(default=8_192, ge=8)
    """Maximum length of a row in tokens."""

    max_audit_bytes: int = Field(default=4 << 30, ge=0)
    """Maximum number of bytes kept in this home to answer audits, for hubs that audit updates. A task that needs more
    is refused."""

    max_update_bytes: int = Field(default=1 << 30, ge=1)
    """Maximum size of one round's upload in bytes."""

    max_download_bytes: int = Field(default=16 << 30, ge=1)
    """Maximum number of bytes downloaded for one task."""

    max_total_download_bytes: int | None = Field(default=None, ge=1)
    """Maximum number of bytes downloaded in one run of ``join``, including all rounds. None: no limit."""

    max_base_bytes: int = Field(default=64 << 30, ge=1)
    """Maximum size in bytes of a base model downloaded from a hub."""

    max_seconds: float = Field(default=4 * 3600.0, gt=0)
    """Time limit of one task in seconds: training, distillation of scales, encoding, and reading the suites that the
    hub evaluates on. A task that takes longer is interrupted, even in the middle of a step, and returned with an
    error."""

    threads: int | None = Field(default=None, ge=1, le=4096)
    """Number of torch threads during training; None: torch's default, the machine's cores."""

    max_upload_bytes_per_second: int | None = Field(default=None, ge=1024)
    """Maximum upload rate in bytes per second. None: no limit."""

    max_download_bytes_per_second: int | None = Field(default=None, ge=1024)
    """Maximum download rate in bytes per second. None: no limit."""

    max_lora_rank: int = Field(default=256, ge=1)
    """Maximum adapter rank."""

    algorithms: list[RecipeAlgorithm] = Field(default_factory=lambda: list(ALGORITHMS.own_with("federates")))
    """Allowed training algorithms; by default all built-in ones that a hub can request."""

    finetuning: list[RecipeTuning] = Field(default_factory=lambda: list(TUNING.own_with("federates")))
    """Allowed kinds of fine-tuning; by default all built-in ones that a hub can request."""

    max_optimizer_state_bytes: int = Field(default=16 << 30, ge=0)
    """Maximum size in bytes of AdamW's moments (8 bytes per weight) that are kept for one update under
    ``recipe.keep_optimizer_state``. A task that needs more is refused."""

    max_epsilon: float | None = Field(default=None, gt=0)
    """Maximum epsilon of one example of the data in use, over all rounds of all hubs. With a limit, a task without
    ``recipe.privacy`` is refused. Absent: no limit."""

    max_hub_epsilon: float | None = Field(default=None, gt=0)
    """Maximum epsilon of a hub's own (contributor-level) privacy budget; with a limit, a hub without a budget is
    refused."""

    max_target_delta: float = Field(default=1e-3, gt=0, lt=1)
    """Maximum delta at which a hub or a recipe may state its epsilon; at a large delta, any epsilon is small."""

    require_secure_aggregation: bool = False
    """True to refuse hubs and tasks that let the hub see individual updates."""

    contaminated_rows: Literal["drop", "keep", "refuse"] = "drop"
    """Handling of local rows that contain rows of an evaluation suite on this machine: leave them out, train on them
    anyway, or do not join. Their number is always shown."""

    hours: list[str] = Field(default_factory=list)
    """Local times of day at which a round may begin, such as ``22:00-07:00``; empty: any time."""

    on_battery: Literal["train", "pause", "refuse"] = "train"
    """Behaviour on battery: train anyway, wait for mains power, or end ``join``."""

    publish_name: bool = False
    """True to agree that models made from this home's updates name you, by the account's name. Every signed update
    states this consent; the newest update decides."""

    seeding: SeedingPolicy | None = None
    """Exchange of public objects with other contributors, on hubs that allow it (docs/seeding.md); by default none."""

    mirrors: bool = True
    """True to download public objects from the mirrors that a hub names, which then learn this machine's address."""

    observe: ObservePolicy | None = None
    """Metrics and traces for this machine's owner (docs/observe.md); by default none. Read when ``join`` begins."""

    pause: bool = False
    """True to pause the agent until this is removed."""

    base_digests: list[str] | None = None
    """Digests of the bases that may be trained; absent: any base on this machine."""

    @field_validator("hours")
    @classmethod
    def _hours_are_times(cls, hours: list[str]) -> list[str]:
        for span in hours:
            if not _HOURS.fullmatch(span):
                raise ValueError(f"{span!r} is not a time range: write it like '22:00-07:00'")
            if span[:5] == span[6:]:
                raise ValueError(f"{span!r} is an empty time range: to allow the whole day, remove hours")
        return hours

    def next_hours(self, now: datetime) -> str:
        """Return the time at which a round may start next, as ``HH:MM``; empty if it may start now."""
        time = now.strftime("%H:%M")
        spans = [(span[:5], span[6:]) for span in self.hours]
        if not spans or any(_within(time, *span) for span in spans):
            return ""
        begins = sorted(begin for begin, _ in spans)
        return next((begin for begin in begins if begin > time), begins[0])

    @property
    def rates(self) -> tuple[int | None, int | None]:
        """Maximum upload and download rates in bytes per second."""
        return self.max_upload_bytes_per_second, self.max_download_bytes_per_second

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read ``policy.yaml``; return the defaults if it does not exist.

        Raises:
            GymError: ``CONFIG_INVALID`` with file, line and column.
        """
        return load_config(path, cls) if path.exists() else cls()

    def check(self, spec: TaskSpec) -> None:
        """Raise ``POLICY_REFUSED`` for the first field over its limit, with its value and limit."""
        self.check_recipe(spec.recipe, spec.base_digest)
        if self.require_secure_aggregation and spec.secure_aggregation is None:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                "the task has no secure_aggregation, but this machine's policy has require_secure_aggregation",
                "remove require_secure_aggregation from policy.yaml to allow it",
            )
        self.check_download(bytes_to_join(spec.soups))

    def check_recipe(self, recipe: TrainingRecipe, base_digest: str) -> None:
        """Check an announced recipe before any task exists; see ``check``."""
        _allowed("recipe.algorithm", recipe.algorithm, "algorithms", self.algorithms)
        _allowed("recipe.finetuning", recipe.finetuning, "finetuning", self.finetuning)
        if self.base_digests is not None:
            _allowed("base_digest", base_digest, "base_digests", self.base_digests)
        if self.max_epsilon is not None and recipe.privacy is None:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                "the task has no recipe.privacy, so the epsilon of an example is infinite; "
                f"this machine's max_epsilon is {self.max_epsilon:g}",
                "remove max_epsilon from policy.yaml to allow it",
            )
        if recipe.privacy is not None:
            delta = recipe.privacy.target_delta
            _at_most("recipe.privacy.target_delta", delta, "max_target_delta", self.max_target_delta)
        _at_most("recipe.max_steps", recipe.max_steps, "max_steps", self.max_steps)
        _at_most("recipe.max_length", recipe.max_length, "max_length", self.max_length)
        batch = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
        tokens = batch * recipe.max_length
        _at_most("number of tokens per step", tokens, "max_tokens_per_step", self.max_tokens_per_step)
        if recipe.sends_factors:
            _at_most("recipe.lora.r", recipe.lora.r, "max_lora_rank", self.max_lora_rank)

    def check_download(self, num_bytes: int) -> None:
        """Raise ``POLICY_REFUSED`` if a task's download is too large."""
        _at_most("download in bytes", num_bytes, "max_download_bytes", self.max_download_bytes)

    def check_optimizer_state(self, num_bytes: int) -> None:
        """Raise ``POLICY_REFUSED`` if the moments that a task would keep are too large."""
        most = self.max_optimizer_state_bytes
        _at_most("size of kept moments in bytes", num_bytes, "max_optimizer_state_bytes", most)

    def check_total_download(self, num_bytes: int) -> None:
        """Raise ``POLICY_REFUSED`` if the downloads of one run of ``join`` are too large."""
        if self.max_total_download_bytes is not None:
            most = self.max_total_download_bytes
            _at_most("total download in bytes", num_bytes, "max_total_download_bytes", most)

    def check_terms(self, join_bytes: int, round_bytes: int, rounds: int | None) -> None:
        """Raise ``POLICY_REFUSED`` if the download of the first task, of a later task or of all tasks is too large.

        Args:
            join_bytes: Announced number of bytes to fetch before the first round.
            round_bytes: Announced number of bytes to fetch per further round.
            rounds: Number of remaining rounds; None if unknown.
        """
        if self.max_total_download_bytes is not None and rounds is not None:
            self.check_total_download(join_bytes + rounds * round_bytes)
        for purpose, num_bytes in (("to join", join_bytes), ("per round", round_bytes)):
            if num_bytes > self.max_download_bytes:
                raise GymError(
                    ErrorCode.POLICY_REFUSED,
                    f"the hub announces {counted(num_bytes, 'byte')} to download {purpose}, over this machine's "
                    f"max_download_bytes of {self.max_download_bytes:,}",
                    "raise max_download_bytes in policy.yaml to allow it",
                )

    def check_base(self, num_bytes: int, join_bytes: int, round_bytes: int, rounds: int | None) -> None:
        """Raise ``POLICY_REFUSED`` if the download of a base, or of the base and all tasks together, is too large.

        Args:
            num_bytes: Announced size of the base in bytes.
            join_bytes: Announced number of bytes to fetch before the first round.
            round_bytes: Announced number of bytes to fetch per further round.
            rounds: Number of remaining rounds; None if unknown.
        """
        if num_bytes > self.max_base_bytes:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                f"the hub's base has {counted(num_bytes, 'byte')}, over this machine's max_base_bytes of "
                f"{self.max_base_bytes}",
                "raise max_base_bytes in policy.yaml, or pass your own copy with --base PATH",
            )
        self.check_total_download(num_bytes + join_bytes + (rounds or 0) * round_bytes)

    def check_update(self, num_bytes: int) -> None:
        """Raise ``POLICY_REFUSED`` if an update exceeds the upload limit."""
        _at_most("upload in bytes", num_bytes, "max_update_bytes", self.max_update_bytes)


def _within(time: str, begin: str, end: str) -> bool:
    """Return True if a time of day lies within a span, which may cross midnight."""
    return begin <= time < end if begin < end else time >= begin or time < end


def _at_most(field: str, value: float, limit_name: str, limit: float) -> None:
    if value > limit:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the task's {field} is {value}, over this machine's {limit_name} of {limit}",
            f"raise {limit_name} in policy.yaml to allow it",
        )


def _allowed(field: str, value: str, limit_name: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the task's {field} is {value!r}; this machine's {limit_name}: {', '.join(allowed) or 'none'}",
            f"add it to {limit_name} in policy.yaml to allow it",
        )
