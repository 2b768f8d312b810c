"""Where the figures of a run go beside its folder; names are those of ``gym_fed.core.registries.TRACKERS``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import TRACKERS

ALWAYS = ("jsonl", "tensorboard")
"""Trackers of every run; both write into its folder and nowhere else."""


class TrackerSettings(StrictModel):
    """What is sent to a tracking service about a run. Read only when ``tracking`` names one."""

    project: str = "gym-fed"
    name: str | None = None
    """The run's name there; by default that of ``output_dir``."""

    tags: list[str] = Field(default_factory=list)
    mode: Literal["offline", "online"] = "offline"
    """``offline`` keeps everything in the run folder (``wandb sync`` and its likes send it later)."""

    uri: str | None = None
    """For ``mlflow`` and ``mode: online``: the tracking server. Offline is always a file in the run folder."""


class TrackingSections(StrictModel):
    """Keys of the YAML's top level."""

    tracking: list[Annotated[str, MemberOf(TRACKERS)]] = Field(
        default_factory=lambda: list(ALWAYS), validate_default=True
    )
    """Where figures are logged. ``jsonl`` and ``tensorboard`` are always on; by default nothing leaves the machine."""

    tracker: TrackerSettings = Field(default_factory=TrackerSettings)

    @field_validator("tracking")
    @classmethod
    def _always_there(cls, names: list[str]) -> list[str]:
        return list(dict.fromkeys((*ALWAYS, *names)))
