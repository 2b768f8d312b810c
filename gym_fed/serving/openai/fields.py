"""Reading a request strictly: unknown fields, and known ones that this server lacks, are refused by name.

A field of OpenAI's specification that changes nothing here at its neutral value is accepted at that value alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from gym_fed.config.base import StrictModel
from gym_fed.serving.openai.refusals import RequestError


class RequestModel(StrictModel):
    """Base of all request schemas: no unknown field, and no text for a number."""

    model_config = ConfigDict(strict=True)


Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that are known and not supported, each with the values that ask for nothing; None always does."""

RequestT = TypeVar("RequestT", bound=RequestModel)


def parse(schema: type[RequestT], body: Any, neutral: Neutral) -> RequestT:
    """Validate a request.

    Raises:
        RequestError: Naming the first field that is off, and how.
    """
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    kept = {}
    for key, value in body.items():
        _require_text(key, value)
        if key not in neutral or key in schema.model_fields:
            kept[key] = value
        elif value is not None and not any(_same(value, known) for known in neutral[key]):
            raise unsupported(key, neutral[key])
    try:
        return schema.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _param(first["loc"], kept, missing=first["type"] == "missing")
        if (field := first.get("ctx", {}).get("field")) is not None:
            param = f"{param}.{field}" if param else field
        if first["type"] == "extra_forbidden":
            raise RequestError(f"unknown field {param!r}", param=param, name="unknown_parameter") from error
        if first["type"] == "missing":
            raise RequestError(
                f"required field {param!r} is missing", param=param, name="missing_required_parameter"
            ) from error
        if first["type"] == "unsupported":
            raise RequestError(
                f"field {param!r}: {first['msg']}", param=param, name="unsupported_parameter"
            ) from error
        raise RequestError(f"field {param!r}: {first['msg']}", param=param) from error


def off(field: str, said: str) -> PydanticCustomError:
    """For validators of whole requests: what is wrong, and the field that is to blame, which pydantic does not know."""
    return PydanticCustomError("off", "{said}", {"said": said, "field": field})


def only(*neutral: Any) -> BeforeValidator:
    """For a nested field that is known and not supported: null, or these values, which ask for nothing."""

    def check(value: Any) -> Any:
        if value is not None and not any(_same(value, known) for known in neutral):
            raise PydanticCustomError("unsupported", "it is known, but not supported here")
        return value

    return BeforeValidator(check)


def unsupported(field: str, neutral: tuple[Any, ...] = ()) -> RequestError:
    """A field that is in OpenAI's specification, but not in what this server can do."""
    allowed = f"leave it out, or give {' or '.join(map(repr, neutral))}" if neutral else "leave it out"
    return RequestError(
        f"field {field!r} is known, but not supported here",
        param=field,
        name="unsupported_parameter",
        hint=allowed,
    )


def _require_text(key: str, value: Any) -> None:
    """Refuse half characters, which JSON can write as ``\\ud800`` and no tokenizer can read."""
    try:
        json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = key.encode(errors="replace").decode()
        raise RequestError(f"field {shown!r} has half a character (a lone surrogate)", param=shown) from error


def _same(value: Any, known: Any) -> bool:
    """Equal, and of one type: 1 is not True."""
    return type(value) is type(known) and bool(value == known)


def _param(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """``messages[0].content``: pydantic's location without the names of union members, which nobody wrote.

    The last part of something that is missing is not in the body either, but is the name of the field.
    """
    path, value = "", body
    for depth, key in enumerate(loc):
        last = depth == len(loc) - 1
        if isinstance(value, dict) and isinstance(key, str) and (key in value or (missing and last)):
            path, value = f"{path}.{key}" if path else key, value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            path, value = f"{path}[{key}]", value[key]
    return path
