"""The vocabulary that guides see: the tokens' bytes, whatever was added to the tokenizer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.engine.guided import GuideFactory, compiled
from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.plain_tokenizer import PlainTokenizer

ADDED = {"<tool_call>": False, "</tool_call>": False, "<think>": True, "[INST]": False, "ab": False}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["ab", "abc<think>", "x"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {
    "a control token": Grammar("grammar", 'start: <think> "ab" /[a-z]+/'),
    "two tokens and a schema": Grammar(
        "grammar", f'start: <tool_call> "\\n" value "\\n" </tool_call>\nvalue: %json {json.dumps(SCHEMA)}'
    ),
    "a schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "a pattern": Grammar("regex", "(ab|ac|éa)+x?"),
    "choices": Grammar("choice", '["abab", "[INST] x"]'),
}


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(load_tokenizer("gym-nano").backend_tokenizer.to_str())


def sentence_piece() -> Tokenizer:
    """A vocabulary with byte fallback that writes a space before a text, as Llama 2's."""
    pieces = [
        "<unk>",
        "<|im_end|>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcexinmdk",
        "▁a",
        "ab",
    ]
    merges = [("▁", "a"), ("a", "b")]
    model = models.BPE(
        dict(zip(pieces, range(len(pieces)), strict=True)), merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<|im_end|>")])
    return tokenizer


KINDS = {"byte-level": byte_level, "byte fallback": sentence_piece}


def with_added(backend: Tokenizer, added: dict[str, bool]) -> PlainTokenizer:
    for text, special in added.items():
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
    return PlainTokenizer(backend, {"eos_token": "<|im_end|>"}, None, "made here")


def factory_of(tokenizer: PlainTokenizer, size: int) -> GuideFactory:
    assert tokenizer.eos_token_id is not None
    return GuideFactory(TextDecoder(tokenizer), size, frozenset({tokenizer.eos_token_id}))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_those_of_the_librarys_own_reader_of_tokenizers(kind: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = with_added(KINDS[kind](), ADDED)
    assert tokenizer.eos_token_id is not None
    size = len(tokenizer) + 3  # rows of the model without a token
    factory = factory_of(tokenizer, size)
    theirs = LLTokenizer(
        tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=[tokenizer.eos_token_id]
    )
    chooser = random.Random(0)
    for name, grammar in GRAMMARS.items():
        for _ in range(4):
            guide, matcher = factory.guide(grammar), LLMatcher(theirs, compiled(grammar), log_level=0)
            for _ in range(40):
                mask = matcher.compute_bitmask()
                allowed = [at for at in range(size) if mask[at // 8] >> (at % 8) & 1]
                assert [at for at, no in enumerate(guide.banned()) if not no] == allowed, name
                token = chooser.choice(allowed)
                guide.push(token)
                matcher.consume_token(token)
                if guide.complete:
                    break
            assert guide.complete == matcher.is_stopped()


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_an_added_token_has_the_bytes_that_the_grammar_forces(kind: str) -> None:
    tokenizer = with_added(KINDS[kind](), {'"name"': False})  # some tokenizers write a space after it
    decoder, chooser = TextDecoder(tokenizer), random.Random(0)
    schema = {**SCHEMA, "properties": {name: {"enum": ["ab", "mine"]} for name in ("name", "kind")}}
    for _ in range(6):
        guide = factory_of(tokenizer, len(tokenizer)).guide(Grammar("json_schema", json.dumps(schema)))
        data = b""
        while not guide.complete and len(data) < 200:
            allowed = [at for at, no in enumerate(guide.banned()) if not no and decoder.token(at).strip()]
            token = chooser.choice(allowed)
            guide.push(token)
            data += b"" if decoder.is_special(token) else decoder.token(token)
        assert json.loads(data).keys() == {"name", "kind"}


@pytest.mark.parametrize("text", ["café", "Ωmega", "§5A"])
def test_an_added_token_of_other_characters_is_complete_in_a_guided_answer(text: str) -> None:
    tokenizer = with_added(byte_level(), {text: False})
    guide = factory_of(tokenizer, len(tokenizer)).guide(
        Grammar("json_schema", '{"type": "string", "maxLength": 20}')
    )
    token: Any = tokenizer.convert_tokens_to_ids(text)
    for token_id in (*tokenizer.encode('"'), token):
        assert not guide.banned()[token_id]
        guide.push(token_id)
    assert not guide.banned()[tokenizer.encode('"')].any()
    assert not guide.banned()[tokenizer.encode("a")].any()


@pytest.mark.parametrize("special", [False, True])
def test_an_added_token_too_long_for_the_librarys_tree_is_refused_with_its_length(special: bool) -> None:
    tokenizer = with_added(byte_level(), {"x" * 1100: special})  # llguidance panics
    with pytest.raises(GymError) as caught:
        factory_of(tokenizer, len(tokenizer))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert "the longest has 1,100 bytes" in caught.value.message


def test_added_tokens_are_listed_once_and_again_after_more_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_added(byte_level(), ADDED)
    before = tokenizer.added_tokens_decoder
    assert tokenizer.added_tokens_decoder is before
    assert list(before) == sorted(before)
    copied = tokenizer.__copy__()
    assert copied.added_tokens_decoder is before
    assert copied.add_tokens([AddedToken("more")]) == 1
    assert copied.added_tokens_encoder["more"] == len(tokenizer)
    assert "more" not in tokenizer.added_tokens_encoder
