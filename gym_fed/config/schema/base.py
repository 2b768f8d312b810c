"""The base class of all config schemas: unknown keys are refused, and values are frozen after validation.

The module also has errors about combinations of settings, and defaults for keys that a stored config lacks.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticUndefined, to_jsonable_python

from gym_fed.core import aliases
from gym_fed.core.text import counted

_BOOLEAN_WORDS = {False: ("no", "off"), True: ("yes", "on")}
"""Words that YAML 1.1 reads as booleans if unquoted."""


class StrictModel(BaseModel):
    """A schema that refuses unknown keys. The docstrings of its fields are the help texts in its JSON schema.

    Validators are built at the first validation, since most programs validate few of the classes that they import.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_help(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _parse_truth_values(cls, values: Any) -> Any:
        """Read ``mixed_precision: no`` as the word ``no`` if the key accepts that word but not a boolean."""
        if not isinstance(values, dict) or not any(isinstance(value, bool) for value in values.values()):
            return values
        return {
            key: _word(value, cls.model_fields[key].annotation)
            if isinstance(value, bool) and key in cls.model_fields
            else value
            for key, value in values.items()
        }


@functools.cache
def field_help(schema: type) -> Mapping[str, str]:
    """Return the docstrings below the annotated attributes of a schema and its bases, by attribute.

    They are read from the source when a JSON schema is written. Pydantic's ``use_attribute_docstrings`` would read it
    at every start of a program, which took half of the import time of the config classes. A class without source, such
    as one from ``pydantic.create_model``, has only the help of its bases.
    """
    own = (
        base for base in reversed(schema.__bases__) if issubclass(base, BaseModel) and base is not BaseModel
    )
    inherited = [field_help(base) for base in own]
    texts = {name: text for base in inherited for name, text in base.items()}
    try:
        source = inspect.getsource(schema)
    except (OSError, TypeError):
        return texts
    (written,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(written, ast.ClassDef)
    for field, below in zip(written.body, written.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            texts.pop(field.target.id, None)  # a redeclared field does not inherit its help
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[field.target.id] = inspect.cleandoc(str(below.value.value))
    return texts


def _no_url(value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        raise ValueError(
            f"{value!r} is a URL, but this must be a local folder; copy the result there afterwards"
        )
    return value


LocalPath = Annotated[Path, BeforeValidator(_no_url)]
"""A path on this machine. ``Path`` alone would turn a URL into a folder ``s3:``."""


MAX_KEYS = 1000
"""Maximum number of keys of a section whose unknown keys are looked up, which takes milliseconds for each."""


def require_few_keys(values: Any) -> None:
    """Refuse a section with more than ``MAX_KEYS`` keys, before any of them is looked up.

    Raises:
        ValueError: With the number of keys.
    """
    if isinstance(values, dict) and len(values) > MAX_KEYS:
        raise ValueError(f"has {counted(len(values), 'key')}; at most {MAX_KEYS:,} are allowed")


class AcceptsAliases(StrictModel):
    """A schema that accepts names from other tools with a note; aliases are looked up only after a value is refused."""

    from_file: ClassVar[str] = "the values of a file"
    """Validation context for callers that look up aliases themselves because they know the positions."""

    @model_validator(mode="wrap")
    @classmethod
    def _resolve_aliases(
        cls, values: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo
    ) -> Any:
        require_few_keys(values)
        try:
            return handler(values)
        except ValidationError:
            if not isinstance(values, dict) or info.context == cls.from_file:
                raise
            reading = aliases.read(cls.__name__, values)
            if reading is None:
                raise
            for _, theirs, ours in reading.notes:
                aliases.note(theirs, ours)
            return handler(reading.values)


def _word(value: bool, annotation: Any) -> Any:
    """Return the original word if ``annotation`` accepts only that; otherwise the value itself."""
    members = list(_members(annotation))
    if bool in members:
        return value
    words = [word for word in _BOOLEAN_WORDS[value] if word in members]
    return words[0] if len(words) == 1 else value


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union, and the values of its literals."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [member for part in get_args(annotation) for member in _members(part)] or [annotation]


class Problem(NamedTuple):
    """A problem with one or more keys, and the reason."""

    key: str
    """The offending key, such as ``gate.screen_updates``; it may be missing in the file."""

    text: str
    """The reason and the remedy, which follow the key in a message."""

    def __str__(self) -> str:
        return f"{self.key} {self.text}" if self.text[:1] != ":" else f"{self.key}{self.text}"


class Problems(ValueError):
    """Raised by validators; ``gym_fed.config.yaml.file`` writes one line per problem, with its position in the file.

    Args:
        cause: Section that conflicts with the keys, such as ``privacy``; empty for none.
        problems: At least one.
    """

    def __init__(self, cause: str, problems: Iterable[Problem]) -> None:
        self.cause, self.problems = cause, list(problems)
        text = "; ".join(map(str, self.problems))
        super().__init__(f"{cause}: {text}" if cause else text)


def first_problem(error: ValidationError, whole: str = "") -> str:
    """Return the first error of a schema, as ``field.part: reason``.

    Args:
        error: Error of a schema.
        whole: Name of the document, for errors that belong to no field.
    """
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or whole
    return f"{where}: {first['msg']}"


def with_schema_defaults(stored: Any, config: Any) -> Any:
    """Return stored values with defaults for the keys that only ``config`` has, for comparison.

    Args:
        stored: Values from a file of an older release, with current key names.
        config: Current config. Its type provides the defaults, including those of sections and lists of sections; its
            values are not used.

    Returns:
        The values as ``model_dump(mode="json")`` would give them. A missing required key stays missing.
    """
    if isinstance(config, list | tuple) and isinstance(stored, list) and len(config) == len(stored):
        return [with_schema_defaults(entry, now) for entry, now in zip(stored, config, strict=True)]
    if not isinstance(config, BaseModel) or not isinstance(stored, Mapping):
        return stored
    filled = {key: with_schema_defaults(value, getattr(config, key, None)) for key, value in stored.items()}
    for key, field in type(config).model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        if key not in stored and default is not PydanticUndefined and not field.exclude:
            filled[key] = to_jsonable_python(default)
    return filled
