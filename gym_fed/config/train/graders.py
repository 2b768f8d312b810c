"""The graders that reward answers: the ``graders`` list of a config, one entry per grader."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import ByMember, Chosen, MemberOf
from gym_fed.core.registries import GRADERS, Kind

Device = Literal["auto", "cpu", "cuda", "mps"]


class GraderConfig(ByMember):
    """The common keys of grader entries; graders add their own."""

    member_key: ClassVar[str] = "grader"
    member_kind: ClassVar[Kind[Any]] = GRADERS

    grader: Annotated[str, MemberOf(GRADERS)]
    weight: float = 1.0
    """Factor of the grader's value; a negative weight is a penalty."""

    clip: tuple[float, float] | None = None
    """Range to which the grader's value is clipped, before the weight."""

    name: str | None = Field(default=None, min_length=1)
    """Name of the reward in metrics; by default the grader's own name."""

    @model_validator(mode="after")
    def _validate_clip(self) -> GraderConfig:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError("clip: the first number must be below the second")
        return self


class GraderSections(StrictModel):
    """Top-level keys of the YAML file."""

    graders: list[Annotated[SerializeAsAny[GraderConfig], Chosen(GraderConfig)]] = Field(default_factory=list)
    """Graders that reward an answer, for ``ppo``, ``grpo``, ``gspo`` and ``rloo``; the reward is their weighted sum."""

    @model_validator(mode="after")
    def _validate_graders(self) -> GraderSections:
        names = [entry.name or entry.grader for entry in self.graders]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"graders: two graders are called {twice!r}; give one of them another name")
        if self.graders and all(entry.weight == 0 for entry in self.graders):
            raise ValueError("graders: every weight is 0")
        return self
