"""The base class of every config schema: unknown keys are refused, values are frozen after validation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from gym_fed.core import aliases as other_words

_SAID = {False: ("no", "off"), True: ("yes", "on")}
"""Words that YAML 1.1 reads as a truth value where they stand without quotes."""


class StrictModel(BaseModel):
    """A schema that refuses unknown keys. ``use_attribute_docstrings`` turns docstrings into field help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _parse_truth_values(cls, values: Any) -> Any:
        """``mixed_precision: no`` is the word ``no``, where a key takes that word and no truth value."""
        if not isinstance(values, dict) or not any(isinstance(value, bool) for value in values.values()):
            return values
        return {
            key: _word(value, cls.model_fields[key].annotation)
            if isinstance(value, bool) and key in cls.model_fields
            else value
            for key, value in values.items()
        }


class ReadsOtherWords(StrictModel):
    """A schema that accepts values of other platforms, each with a note; they are looked up when a value is refused."""

    from_file: ClassVar[str] = "the values of a file"
    """The context of a validation whose caller looks the words up, since it knows their places."""

    @model_validator(mode="wrap")
    @classmethod
    def _parse_other_words(
        cls, values: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo
    ) -> Any:
        try:
            return handler(values)
        except ValidationError:
            if not isinstance(values, dict) or info.context == cls.from_file:
                raise
            reading = other_words.read(cls.__name__, values)
            if reading is None:
                raise
            for _, theirs, ours in reading.notes:
                other_words.note(theirs, ours)
            return handler(reading.values)


def _word(value: bool, annotation: Any) -> Any:
    """Return the written word if ``annotation`` can mean only that; else the value itself."""
    members = list(_members(annotation))
    if bool in members:
        return value
    words = [word for word in _SAID[value] if word in members]
    return words[0] if len(words) == 1 else value


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union, and the values of its literals."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [member for part in get_args(annotation) for member in _members(part)] or [annotation]
