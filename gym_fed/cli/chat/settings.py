"""Sampling settings of `gym chat`, from its options and `/set`; the names are OpenAI's and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.plain_yaml import parse_value


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ChatSettings(StrictModel):
    """Sampling settings; settings that are None are omitted from requests."""

    max_tokens: Annotated[int, Field(ge=1)] | None = 512
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_texts), Field(max_length=4)] | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> ChatSettings:
        """Validate settings.

        Raises:
            GymError: ``USAGE`` naming the setting.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            hint = f"settings: {', '.join(cls.model_fields)}"
            raise GymError(ErrorCode.USAGE, first_problem(error), hint) from error

    def changed(self, text: str) -> ChatSettings:
        """Return the settings after ``name=value``; the value is YAML, and ``none`` unsets it.

        Raises:
            GymError: ``USAGE``.
        """
        name, equals, value = text.partition("=")
        if not equals:
            raise GymError(ErrorCode.USAGE, f"{text!r} is not name=value", "such as /set temperature=0.7")
        if name.strip() not in ChatSettings.model_fields:
            known = ", ".join(ChatSettings.model_fields)
            raise GymError(ErrorCode.USAGE, f"unknown setting {name.strip()[:80]!r}", f"settings: {known}")
        is_text = name.strip() == "stop" and not value.strip().startswith("[")  # "###" is a comment in YAML
        try:
            unsets = value.strip().lower() in ("none", "")
            parsed = None if unsets else value if is_text else parse_value(value)
        except ValueError as error:
            raise GymError(ErrorCode.USAGE, f"{name}: {value[:80]!r} is not a valid value") from error
        return ChatSettings.of({**self.model_dump(), name.strip(): parsed})

    def over(self, model: Mapping[str, Any]) -> ChatSettings:
        """Return these settings on top of the model's own; greedy if neither has a temperature."""
        own = {name: value for name, value in model.items() if name != "top_k" or value > 0}
        return ChatSettings.of({"temperature": 0.0, **own, **self.fields()})

    def fields(self) -> dict[str, Any]:
        """Return the sampling keys of a request."""
        return self.model_dump(exclude_none=True)

    def __str__(self) -> str:
        return "  ".join(f"{name}={value}" for name, value in self.fields().items()) or "nothing is set"
