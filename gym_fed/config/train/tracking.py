"""Settings of the trackers that receive a run's metrics; names are those of ``gym_fed.core.registries.TRACKERS``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import TRACKERS

ALWAYS = ("jsonl", "tensorboard")
"""Trackers of every run; both write only into its folder."""


class TrackerSettings(StrictModel):
    """Settings of a tracking service. Read only when ``tracking`` names one."""

    project: str = "gym-fed"
    name: str | None = None
    """The run's name in the service; by default that of ``output_dir``."""

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
    """Where metrics are logged. ``jsonl`` and ``tensorboard`` are always on; by default nothing leaves the machine."""

    tracker: TrackerSettings = Field(default_factory=TrackerSettings)

    @field_validator("tracking")
    @classmethod
    def _validate_tracking(cls, names: list[str]) -> list[str]:
        return list(dict.fromkeys((*ALWAYS, *names)))
