"""Help of a schema's fields: the docstring below each, in its JSON schema."""

from __future__ import annotations

from typing import Any

from pydantic import Field, create_model

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.training import TrainingConfig


class _Base(StrictModel):
    described: int = 1
    """How many,
    over two lines."""

    plain: int = 2
    again: int = 3
    """Of the base."""

    by_field: int = Field(4, description="Said by the field.")
    """Said below it."""


class _Derived(_Base):
    again: int = 5
    own: _Base | None = None
    """One of the others."""


def descriptions(schema: type[StrictModel]) -> dict[str, Any]:
    properties = schema.model_json_schema()["properties"]
    return {name: facts["description"] for name, facts in properties.items() if "description" in facts}


def test_a_field_has_the_docstring_below_it_unless_it_says_otherwise() -> None:
    found = descriptions(_Base)
    assert found == {
        "described": "How many,\nover two lines.",
        "again": "Of the base.",
        "by_field": "Said by the field.",
    }


def test_a_derived_schema_has_the_help_of_its_base_and_none_for_a_field_declared_again() -> None:
    found = descriptions(_Derived)
    assert found["described"] == "How many,\nover two lines."
    assert found["own"] == "One of the others."
    assert "again" not in found
    made = create_model("Made", __base__=_Derived, more=(int, 1))  # it has no source
    assert descriptions(made) == found


def test_every_section_of_a_training_file_keeps_its_help() -> None:
    properties = TrainingConfig.model_json_schema()["properties"]
    assert properties["max_length"]["description"]
    assert properties["model"]["description"]
