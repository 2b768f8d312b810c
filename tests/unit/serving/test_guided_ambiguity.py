"""Ambiguous grammars end their answer in time; wide and deep unambiguous ones are served."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.guided import Guide, GuideFactory
from gym_fed.serving.engine.request import GenerationRequest, Grammar, SamplingParams
from gym_fed.serving.http.gateway import PublicErrors
from tests.support.toy_engine import END, ToyModel
from tests.support.wait import SECONDS

AMBIGUOUS = ('start: a\na: a a | "a" | "b" a a |', 'start: a\na: a a | "a" |', "root ::= root root | [ab] |")
CALCULATOR = """
start: sum
sum: product (("+" | "-") product)*
product: power (("*" | "/") power)*
power: atom ("^" power)?
atom: NUMBER | NAME | "(" sum ")" | NAME "(" (sum ("," sum)*)? ")"
NUMBER: /[0-9]+/
NAME: /[a-z]+/
"""
KEYWORDS = 'start: word (" " word)*\nword: ' + " | ".join(f'"w{at:03}"' for at in range(100))
DEEP: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
for _ in range(10):
    DEEP = {
        "type": "object",
        "properties": {"a": DEEP, "b": {"type": "array", "items": {"anyOf": [DEEP["properties"], {}]}}},
    }
WIDE = {"type": "object", "properties": {f"name_{at}": {"type": "string"} for at in range(300)}}
ROUND = {"$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
HONEST = {
    "a calculator": Grammar("grammar", CALCULATOR),
    "a hundred words": Grammar("grammar", KEYWORDS),
    "a schema in a grammar": Grammar("grammar", f"start: %json {json.dumps(ROUND)}"),
    "a recursive schema": Grammar("json_schema", json.dumps(ROUND)),
    "a wide schema": Grammar("json_schema", json.dumps(WIDE)),
    "choices": Grammar("choice", json.dumps([f"choice {at}" for at in range(1000)])),
    "a pattern": Grammar("regex", r"([a-z]+ ?){1,40}(\\d{1,3}\\.){3}\\d"),
}


@pytest.fixture(scope="module")
def factory(tokenizer: Any) -> GuideFactory:
    return GuideFactory(TextDecoder(tokenizer), len(tokenizer), frozenset({END}))


def walk(guide: Guide, tokens: int, seed: int) -> None:
    """Random allowed tokens; the end only where nothing else is allowed."""
    random = np.random.default_rng(seed)
    for _ in range(tokens):
        if guide.complete:
            return
        allowed = np.flatnonzero(~guide.banned())
        others = allowed[allowed != END]
        guide.push(int(random.choice(others if len(others) else allowed)))


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_own_answer_before_masks_take_long(
    tokenizer: Any, grammar: str
) -> None:
    toy = ToyModel(4096)
    held = SamplingParams(max_tokens=300, grammar=Grammar("grammar", grammar), logit_bias={END: -100.0})
    with Engine(toy, tokenizer) as engine:
        ambiguous = [engine.submit(GenerationRequest([2, 1], held)) for _ in range(3)]
        free = engine.submit(GenerationRequest([2, 1], SamplingParams(max_tokens=300, ignore_eos=True)))
        for one in ambiguous:
            with pytest.raises(GymError, match="the grammar can no longer be enforced") as refused:
                one.result(SECONDS)
            assert refused.value.code is ErrorCode.DATA_INVALID
            body = PublicErrors().body(refused.value)["error"]
            assert (body["type"], body["code"]) == ("invalid_request_error", "data_invalid")
            assert body["message"].startswith("the grammar can no longer be enforced: ")
        assert len(free.result(SECONDS).token_ids) == 300


@pytest.mark.parametrize("grammar", HONEST.values(), ids=HONEST)
def test_wide_and_deep_grammars_that_are_not_ambiguous_are_served(
    factory: GuideFactory, grammar: Grammar
) -> None:
    for seed in range(3):
        walk(factory.guide(grammar), 400, seed)
