"""The graders that reward answers: the ``rewards`` list of a config, one entry a grader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializeAsAny, model_validator
from pydantic_core import CoreSchema, core_schema

from gym_fed.config.base import StrictModel
from gym_fed.config.member import MemberOf
from gym_fed.kinds import GRADERS

Device = Literal["auto", "cpu", "cuda", "mps"]


class GraderConfig(StrictModel):
    """What every entry has beside the keys of its own grader."""

    grader: Annotated[str, MemberOf(GRADERS)]
    weight: float = 1.0
    """The grader's value is multiplied by this; a negative weight is a penalty."""

    clip: tuple[float, float] | None = None
    """Lowest and highest value of the grader, before the weight."""

    name: str | None = Field(default=None, min_length=1)
    """How the reward is called in metrics; by default the grader's own name."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> GraderConfig:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError("clip: the first number must be below the second")
        return self


class _ByGrader:
    """An entry is what the settings of its grader make of it; only the graders that are named are imported."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_settings, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        entries = []
        for name in GRADERS.names():
            entry = handler.resolve_ref_schema(
                handler(GRADERS.type_of(name).Settings.__pydantic_core_schema__)
            )
            entry["properties"]["grader"] = {"const": name, "type": "string"}
            entries.append(entry)
        return {"oneOf": entries, "discriminator": {"propertyName": "grader"}}


def _settings(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        name = GraderConfig.model_validate({key: entry[key] for key in entry if key == "grader"}).grader
        return GRADERS.type_of(name).Settings.model_validate(entry)
    if isinstance(entry, GraderConfig) and not isinstance(entry, GRADERS.type_of(entry.grader).Settings):
        raise ValueError(f"{type(entry).__name__} is not what grader {entry.grader!r} is set up by")
    return entry


class RewardSections(StrictModel):
    """Keys of the YAML's top level."""

    rewards: list[Annotated[SerializeAsAny[GraderConfig], _ByGrader()]] = Field(default_factory=list)
    """What rewards an answer, for ``ppo``, ``grpo``, ``gspo`` and ``rloo``; the rewards are summed by weight."""

    @model_validator(mode="after")
    def _names_differ(self) -> RewardSections:
        names = [entry.name or entry.grader for entry in self.rewards]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards: two graders are called {twice!r}; give one of them another name")
        if self.rewards and all(entry.weight == 0 for entry in self.rewards):
            raise ValueError("rewards: every weight is 0")
        return self
