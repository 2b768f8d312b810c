"""Finds the key whose value names a member, for a refusal that the member raises and not the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from gym_fed.config.schema.member import MemberOf
from gym_fed.config.schema.plugins import markers_of
from gym_fed.config.yaml.strict import KeyPath


def place_of(kind: str, name: str, values: Any, schema: type[BaseModel]) -> KeyPath:
    """Return the first place that names a member, as its kind is spelled; empty without one.

    Args:
        kind: The kind of member, such as ``grader``.
        name: Its name in configs; a key of that name that is not a field counts too.
        values: Plain values as they came, valid or not.
        schema: The schema of the values.
    """
    return next(_places(kind, name, values, schema, ()), ())


def models_in(annotations: Sequence[Any]) -> Iterator[type[BaseModel]]:
    """Yield the schemas in annotations, at any depth."""
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        else:
            yield from models_in(get_args(annotation))


def _places(
    kind: str, name: str, value: Any, annotation: Any, markers: Sequence[MemberOf]
) -> Iterator[KeyPath]:
    if value == name and any(kind == known.kind for marker in markers for known in marker.kinds):
        yield ()
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _below(index, _places(kind, name, item, annotation, markers))
    elif isinstance(value, Mapping):
        fields = {k: f for model in models_in([annotation]) for k, f in model.model_fields.items()}
        for key, inner in value.items():
            if (field := fields.get(key)) is not None:
                places = _places(kind, name, inner, field.annotation, markers_of(field))
            elif key == name and fields:
                places = iter([()])
            else:
                places = _places(kind, name, inner, annotation, markers)
            yield from _below(key, places)


def _below(key: str | int, paths: Iterator[KeyPath]) -> Iterator[KeyPath]:
    return ((key, *path) for path in paths)
