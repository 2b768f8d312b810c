"""Schemas whose references lead back to themselves, and other schemas that cannot be enforced: reason and remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.engine.guided import GuideFactory
from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.engine.schema_references import reference_cycle
from tests.support.wishing import tokenizer_with

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": []}
UNION = {"anyOf": [{"$ref": "#/$defs/union"}, {"type": "string"}]}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "#/$defs/",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
            "#/$defs/x",
        ),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/%24defs/a~1b"}}}, "defs/a~1b"),
    ],
)
def test_a_reference_that_leads_back_to_itself_is_found(schema: dict[str, Any], reference: str) -> None:
    assert reference in reference_cycle(schema) != ""


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"$ref": "#/$defs/union", "$defs": {"union": UNION}},
        {"$ref": "#/$defs/none"},
        {"$ref": f"#/anyOf/{'9' * 5000}", "anyOf": [{"type": "string"}]},
        {"$ref": "http://example.org/x"},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "string"}}},
    ],
)
def test_recursive_types_and_references_used_twice_are_no_cycle(schema: dict[str, Any]) -> None:
    assert reference_cycle(schema) == ""


@pytest.mark.parametrize(
    ("schema", "reason", "remedy"),
    [
        ({"$ref": "#"}, "'#' leads back to itself", "remove the $ref"),
        (
            {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
            "oneOf constraints are not supported",
            "write anyOf",
        ),
        ({"$ref": "http://example.org/x"}, "example.org", "#/$defs/NAME"),
        ({"$ref": "#/$defs/none"}, "/$defs/none", "add the definition"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_a_remedy_of_its_own(
    schema: dict[str, Any], reason: str, remedy: str
) -> None:
    tokenizer = tokenizer_with("")
    factory = GuideFactory(TextDecoder(tokenizer), len(tokenizer), frozenset([tokenizer.eos_token_id]))
    with pytest.raises(GymError) as raised:
        factory.guide(Grammar("json_schema", json.dumps(schema)))
    assert raised.value.code is ErrorCode.DATA_INVALID
    assert reason in raised.value.message
    assert remedy in str(raised.value.hint)
    assert "coerce_one_of" not in str(raised.value)
