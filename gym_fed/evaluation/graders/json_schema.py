"""Grade whether an answer is JSON that matches a schema (JSON Schema; draft from ``$schema``, default 2020-12)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import no_constant
from gym_fed.evaluation.graders.base import Grader, Sample

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class JsonSchemaConfig(GraderConfig):
    """1 if the answer is JSON that matches a schema, else 0."""

    json_schema: dict[str, Any] | None = None
    """The schema of all answers; set either this or ``column``. External references are not fetched."""

    column: str | None = None
    """The column with the row's schema, as a mapping or as text."""

    parsed_reward: float = Field(default=0.0, ge=0, le=1)
    """The reward for JSON that does not match the schema."""

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaConfig:
        if (self.json_schema is None) == (self.column is None):
            raise ValueError("set either json_schema or column")
        return self


class JsonSchemaGrader(Grader):
    """1 if the answer, or its only fenced block, is JSON that matches the schema."""

    Settings = JsonSchemaConfig
    config: JsonSchemaConfig

    def __init__(self, config: JsonSchemaConfig) -> None:
        super().__init__(config)
        self._validators: dict[str, Any] = {}

    def setup(self) -> None:
        if self.config.json_schema is not None:
            self._validator(self.config.json_schema, ErrorCode.CONFIG_INVALID)

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> float:
        validator = self._validator_for(sample)
        try:
            value = _read(sample.completion)
        except (ValueError, RecursionError):
            return 0.0
        try:
            is_valid = evaluate(is_valid_in_child, schema=validator.schema, value=value)
        except LimitExceededError:  # a pattern in the schema may take exponential time
            return self.config.parsed_reward
        except EvaluationError as error:
            if "RecursionError" in error.kinds:
                return self.config.parsed_reward
            raise GymError(
                ErrorCode.CONFIG_INVALID, f"graders: {self.name}: the schema cannot be evaluated: {error}"
            ) from error
        if isinstance(is_valid, str):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"graders: {self.name}: the schema refers to {is_valid!r}, which is outside it and is not fetched",
                "put the definition into the schema under $defs",
            )
        return 1.0 if is_valid else self.config.parsed_reward

    def _validator_for(self, sample: Sample) -> Any:
        if self.config.column is None:
            return self._validator(self.config.json_schema, ErrorCode.CONFIG_INVALID)
        schema = sample.column(self.config.column, self.name)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"grader {self.name}: {self.config.column!r} is not JSON: {schema[:60]!r}",
                    "write the schema as a mapping or as JSON text",
                ) from error
        return self._validator(schema, ErrorCode.DATA_INVALID)

    def _validator(self, schema: Any, code: ErrorCode) -> Any:
        """Create a validator of ``schema``; its registry is empty, so nothing is fetched."""
        from jsonschema import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import Draft202012Validator, validator_for  # type: ignore[import-untyped]
        from referencing import Registry

        key = json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            if not isinstance(schema, Mapping):
                raise GymError(code, f"grader {self.name}: the schema is {key[:60]}, not a mapping")
            kind = validator_for(schema, default=Draft202012Validator)
            try:
                kind.check_schema(schema)
            except SchemaError as error:
                raise GymError(
                    code,
                    f"grader {self.name}: invalid JSON schema at {error.json_path}: {error.message}",
                    "correct the schema",
                ) from error
            self._validators[key] = kind(schema, registry=Registry())
        return self._validators[key]


def is_valid_in_child(schema: Mapping[str, Any], value: Any) -> bool | str:
    """Return True if the value matches the schema, or the name of a reference that cannot be resolved; called in the
    child process."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        return bool(kind(schema, registry=Registry()).is_valid(value))
    except Unresolvable as error:
        return str(error.ref)


def _read(text: str) -> Any:
    """Parse a text, or its only fenced block, as JSON.

    Raises:
        ValueError: The text has no valid JSON; ``NaN`` and ``Infinity`` are not JSON.
    """
    blocks = _FENCED.findall(text)
    return json.loads(blocks[0] if len(blocks) == 1 else text, parse_constant=no_constant)
