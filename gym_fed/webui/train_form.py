"""The training form: all keys of the schema by group."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.webui.workbench import plain

FIRST = (
    *("algorithm", "model", "output_dir", "finetuning", "learning_rate", "max_steps", "num_train_epochs"),
    *("per_device_train_batch_size", "max_length", "logging_steps", "save_steps", "seed"),
)
"""Keys that nearly every run sets, shown before the groups."""


_TITLES = {
    "AlgorithmSections": "Algorithm",
    "SupervisedSections": "Supervised algorithms",
    "TuningSections": "Tuning method",
    "AdapterSections": "Adapters to start from",
    "VisionSections": "Images",
    "OptimizationSections": "Optimisation",
    "DataSections": "Rows",
    "GraderSections": "Graders",
    "ComputeSections": "Compute",
    "DistributedSections": "Several processes",
    "PrivacySections": "Privacy",
    "RunSections": "Run",
    "TrackingSections": "Tracking",
    "TrainingConfig": "Model",
}
"""Titles of the schema's sections, by class."""


@cache
def form() -> dict[str, Any]:
    """Create the form: ``{first, groups: [{title, help, fields}], algorithms, tuning}``.

    A field is ``{key, kind, default, choices, least, most, help, section}``. Fields of kind ``yaml`` are edited as
    text.
    """
    schema = TrainingConfig.model_json_schema()
    definitions = schema["$defs"]
    groups = []
    for part in _parts():
        own = [key for key in inspect.get_annotations(part) if key in schema["properties"]]
        fields = [field for key in own for field in fields_of(key, schema["properties"][key], definitions)]
        if fields:
            groups.append({"title": _TITLES[part.__name__], "fields": fields})
    return {
        "first": list(FIRST),
        "groups": groups,
        "algorithms": list(ALGORITHMS.names()),
        "tuning": list(TUNING.names()),
    }


def _parts() -> list[type]:
    """Return the schema's classes that define keys; the schema's own class comes first."""
    return [part for part in TrainingConfig.__mro__ if part.__name__ in _TITLES]


def fields_of(key: str, property: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the field of a key, or the fields of its section."""
    section = next((schema for schema in _forms(property) if "$ref" in schema), None)
    if section is None:
        return [_field(key, property)]
    definition = definitions[section["$ref"].rpartition("/")[2]]
    if definition.get("type") != "object":
        return [_field(key, {**definition, **property})]
    about = str(property.get("description") or definition.get("description") or "")
    fields = [_field(f"{key}.{name}", inner) for name, inner in definition.get("properties", {}).items()]
    return [{**field, "section": key, "section_help": about} for field in fields]


def _field(key: str, property: dict[str, Any]) -> dict[str, Any]:
    forms = _forms(property)
    choices = [
        value
        for schema in forms
        for value in schema.get("enum", [schema["const"]] if "const" in schema else [])
    ]
    kinds = {schema.get("type") for schema in forms}
    if choices and "boolean" in kinds:
        kind, choices = "choice", [True, False, *choices]
    elif choices:
        kind = "choice"
    elif len(kinds) == 1 and kinds <= {"boolean", "integer", "number", "string"}:
        kind = str(kinds.pop())
    elif kinds <= {"boolean", "string"}:
        kind = "string"
    else:
        kind = "yaml"
    bounds = {name: schema[name] for schema in forms for name in schema}
    return {
        "key": key,
        "kind": kind,
        "default": plain(property.get("default")),
        "choices": choices,
        "least": bounds.get("minimum", bounds.get("exclusiveMinimum")),
        "most": bounds.get("maximum", bounds.get("exclusiveMaximum")),
        "help": " ".join(str(property.get("description") or "").replace("``", "`").split()),
    }


def _forms(property: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas of a value except null, since null means that the key is missing."""
    return [schema for schema in property.get("anyOf", [property]) if schema.get("type") != "null"]
