"""Schemas with ``multipleOf``: large ones are refused before they are compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, OpenAIService
from tests.support.tool_templates import HERMES
from tests.support.toy_engine import ToyModel
from tests.support.wishing import served, tokenizer_with

LARGE = {"type": "integer", "multipleOf": 999_983}
HUGE = {"type": "integer", "multipleOf": 3 * 10**400 + 1}  # beyond a float
BOTH = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}


@pytest.fixture(scope="module")
def service() -> Iterator[OpenAIService]:
    with served(ToyModel(4096), tokenizer_with(HERMES)) as found:
        yield found


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"n": schema},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "book", "parameters": parameters, "strict": True}}


@pytest.mark.parametrize("schema", [LARGE, HUGE, BOTH], ids=["one", "huge", "two at once"])
@pytest.mark.parametrize(
    "field", ["response_format", "guided_json", "structured_outputs", "guided_grammar", "tools"]
)
def test_large_multiples_are_refused_by_the_field_before_they_are_compiled(
    service: OpenAIService, monkeypatch: pytest.MonkeyPatch, field: str, schema: dict[str, Any]
) -> None:
    def submitted(*_given: Any) -> None:
        raise AssertionError("it was submitted")

    monkeypatch.setattr(Engine, "submit", submitted)
    given: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "guided_json": schema,
        "structured_outputs": {"json": json.dumps(schema)},
        "guided_grammar": f"start: %json\n  {json.dumps(schema).replace('mult', chr(92) + 'u006dult')}",
        "tools": [tool(schema)],
    }
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        field: given[field],
    }
    with pytest.raises(RequestError, match="multipleOf") as caught:
        service.handle(CHAT, body, LOCAL)
    assert str(caught.value.param).partition(".")[0] == field
    assert caught.value.hint


@pytest.mark.parametrize("multiple", [1, 7, 0.01, 1_000_000, 1e-6, 86_400, 0.25])
def test_multiples_in_use_are_enforced(service: OpenAIService, multiple: float) -> None:
    schema = {"type": "object", "properties": {"multipleOf": {"type": "number", "multipleOf": multiple}}}
    body = {"model": "toy", "prompt": "x", "max_tokens": 4, "guided_json": schema}
    assert service.handle(COMPLETIONS, body, LOCAL)["choices"]
