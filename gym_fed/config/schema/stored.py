"""Configs stored by an older release: keys that it did not know get the schema's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python


def with_schema_defaults(stored: Any, config: Any) -> Any:
    """Return stored values with each key that ``config`` has and they lack, so that the two can be compared.

    Args:
        stored: What a file of an older release holds, under today's names of keys.
        config: The config of today. Its type decides the defaults, also in sections and in lists of sections; its
            values are not used.

    Returns:
        The values as ``model_dump(mode="json")`` would give them. A required key that is missing stays missing.
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
