"""Requests to vLLM: grammars in the one notation that it passes on unchanged, and the chunks of its answers."""

from __future__ import annotations

import json

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import Grammar, SamplingParams
from gym_fed.serving.vllm.bodies import CacheSalts, completion_body, lark_of, read_chunk, require_supported


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
            '{"a": 1}',
            "[1]",
        ),
        (Grammar("regex", "a+b/c"), "aab/c", "b"),
        (Grammar("choice", '["yes", "no"]'), "yes", "maybe"),
        (Grammar("grammar", 'start: "x" /[0-9]+/'), "x12", "y"),
        (Grammar("grammar", 'root ::= "x" [0-9]+'), "x12", "y"),
    ],
)
def test_grammar_in_lark_allows_the_same_texts(grammar: Grammar, right: str, wrong: str) -> None:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    compiled = grammar_from("grammar", lark_of(grammar))  # as vLLM's backend does
    tokenizer = LLTokenizer("byte")
    for text, holds in ((right, True), (wrong, False)):
        matcher = LLMatcher(tokenizer, compiled)
        assert not matcher.is_error(), matcher.get_error()
        assert (matcher.validate_tokens(tokenizer.tokenize_str(text)) == len(text)) is holds


def test_body_has_greedy_decoding_and_our_end_tokens() -> None:
    params = SamplingParams(temperature=0.00001, top_p=0.0, seed=-1, logit_bias={5: 1.0}, logprobs=0)
    body = completion_body("base", [1, 2], params, max_tokens=3, end_ids=frozenset({9, 8}), salt="s")
    assert (body["temperature"], body["prompt"], body["max_tokens"]) == (0.0, [1, 2], 3)
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [8, 9])
    assert 0 < body["top_p"] < 1e-3
    assert body["seed"] == 2**63 - 1
    assert body["logit_bias"] == {"5": 1.0}
    assert json.dumps(body)


def test_salts_differ_between_users_unless_they_share() -> None:
    alone, shared, off = (CacheSalts(b"k", sharing) for sharing in (True, "shared", False))
    assert alone.salt("ada", "1", None, "") != alone.salt("bob", "1", None, "")
    assert alone.salt("ada", "1", None, "") != alone.salt("ada", "2", None, "")
    assert shared.salt("ada", "1", "v", "") == shared.salt("bob", "2", "v", "")
    assert shared.salt("ada", "1", "v", "a") != shared.salt("ada", "1", "v", "b")
    assert alone.salt("ada", "1", None, "") != CacheSalts(b"l", True).salt("ada", "1", None, "")
    assert off.salt("ada", "1", None, "") != off.salt("ada", "1", None, "")


def test_error_in_the_stream_is_raised() -> None:
    with pytest.raises(GymError, match="EngineCore") as error:
        read_chunk({"error": {"message": "EngineCore encountered an issue"}})
    assert error.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("temperature", [0.0, 0.00001, 0.01, 2.0])
def test_temperature_that_vllm_keeps_is_accepted(temperature: float) -> None:
    require_supported(SamplingParams(temperature=temperature))
