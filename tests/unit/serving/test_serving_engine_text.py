"""The text of answers: whole characters, no end tokens or stop texts, and JSON where requested."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import jsonschema
import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import StopTexts, TextDecoder
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.guided import GuideFactory
from gym_fed.serving.engine.request import CompletionOutput, Event, GenerationRequest, Grammar, SamplingParams
from tests.support.toy_engine import END, ToyModel
from tests.support.wait import SECONDS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def held_to(schema: str) -> Grammar:
    return Grammar("json_schema", schema)


def answer(tokenizer: Any, script: list[int], **sampling: Any) -> tuple[list[Event], CompletionOutput]:
    """What is shown of an answer of these tokens."""
    toy = ToyModel()
    toy.script = [*script, *[END] * 50]
    with Engine(toy, tokenizer) as engine:
        generation = engine.submit(GenerationRequest([2, 1], SamplingParams(temperature=0, **sampling)))
        events = list(generation)
        whole = generation.result(SECONDS)
    assert "".join(event.text for event in events) == whole.text
    assert sum((event.token_ids for event in events), ()) == whole.token_ids
    return events, whole


def test_no_end_token_is_sampled_before_min_tokens(tokenizer: Any) -> None:
    for wanted in (0, 1, 4, 9):
        _, whole = answer(tokenizer, [65, 66], min_tokens=wanted, max_tokens=20)
        assert whole.finish_reason == "stop"
        assert len(whole.token_ids) == max(3, wanted + 1)
        assert END not in whole.token_ids[:-1]
    _, stopped = answer(tokenizer, [65, 66, 67], min_tokens=2, max_tokens=20, stop_token_ids=(65, 66, 67))
    assert len(stopped.token_ids) == 3
    _, cut = answer(tokenizer, [65], min_tokens=6, max_tokens=6)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 6)


def test_min_tokens_beyond_the_answer_or_beside_a_schema_is_refused(tokenizer: Any) -> None:
    with Engine(ToyModel(), tokenizer) as engine:
        for sampling in (
            SamplingParams(min_tokens=5, max_tokens=4),
            SamplingParams(min_tokens=-1),
            SamplingParams(min_tokens=2, json_schema="{}"),
        ):
            with pytest.raises(GymError, match="min_tokens") as caught:
                engine.submit(GenerationRequest([1], sampling))
            assert caught.value.code is ErrorCode.USAGE


def test_half_a_character_is_never_shown(tokenizer: Any) -> None:
    text = "é日🙂a"
    events, whole = answer(tokenizer, tokenizer.encode(text))
    assert [event.text for event in events] == ["é", "日", "🙂", "a", ""]
    assert [len(event.token_ids) for event in events] == [2, 3, 4, 1, 1]
    assert (whole.text, whole.finish_reason) == (text, "stop")
    cut, whole = answer(tokenizer, tokenizer.encode(text), max_tokens=4)
    assert [event.text for event in cut] == ["é", ""]
    assert (whole.text, whole.finish_reason) == ("é", "length")


def test_bytes_that_are_no_character_are_shown_as_such_and_stop_nothing(tokenizer: Any) -> None:
    script = [
        0xFF,
        0xFF,
        0xE6,
        0x97,
        0xFF,
        65,
        0xFF,
        0xFF,
        0xFF,
        0xFF,
        0xE6,
        0x97,
        0xA5,
        66,
        *[0xFF] * 30,
        67,
    ]
    _, whole = answer(tokenizer, script)
    assert whole.text == bytes(script).decode(errors="replace")


def test_a_long_answer_is_its_tokens_decoded_at_once(tokenizer: Any) -> None:
    text = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich — 🙂 日本語. " * 3
    _, whole = answer(tokenizer, tokenizer.encode(text), max_tokens=250)
    assert whole.text == tokenizer.decode(list(whole.token_ids), skip_special_tokens=True).rstrip("�")


@pytest.mark.shared
def test_an_answer_of_word_pieces_continues_its_prompt(shared_folder: Any) -> None:
    tokenizer = load_tokenizer(str(shared_folder / "models" / "stories260K"))
    ids = tokenizer.encode("Once upon a time, Zoë saw 日本 and ran  home.", add_special_tokens=False)
    decoder = TextDecoder(tokenizer)
    whole = decoder.text(ids)
    for cut in range(1, len(ids)):
        prompt = decoder.text(ids[:cut]).rstrip("�")
        stream = decoder.stream(ids[:cut])
        shown = [stream.push(token_id) for token_id in ids[cut:]]
        assert prompt + "".join(shown) == whole
        assert "�" not in "".join(shown)
    assert decoder.token(tokenizer.encode("a time", add_special_tokens=False)[-1]).startswith(
        (b" ", b"t", b"e")
    )


def test_special_tokens_are_not_shown(tokenizer: Any) -> None:
    _, whole = answer(tokenizer, [72, 257, 105, 261, 33])
    assert whole.text == "Hi!"
    assert whole.token_ids == (72, 257, 105, 261, 33, END)


def test_an_answer_ends_before_the_first_stop_text_wherever_tokens_end(tokenizer: Any) -> None:
    script = list(b"one two EN EN END three")
    events, whole = answer(tokenizer, script, stop=("END", "three"))
    assert (whole.text, whole.finish_reason) == ("one two EN EN ", "stop")
    assert whole.token_ids == tuple(b"one two EN EN END")
    shown = ""
    for event in events:
        shown += event.text
        assert "one two EN EN ".startswith(shown)
    assert answer(tokenizer, script, stop=("ENX",))[1].text == "one two EN EN END three"
    assert answer(tokenizer, list(b"one EN"), stop=("END",))[1].text == "one EN"


def test_stop_texts_hold_back_no_more_than_they_must() -> None:
    stops = StopTexts(("abab", "xyz"))
    assert [stops.push(text) for text in ("qa", "b", "a", "c", "xy", "xyz!")] == [
        "q",
        "",
        "",
        "abac",
        "",
        "xy",
    ]
    assert stops.matched
    assert StopTexts(("three", "two")).push("one two three") == "one "
    held = StopTexts(("abab",))
    assert [held.push("aba"), held.finish(), held.matched] == ["", "aba", False]


def test_own_stop_tokens_and_ignored_end_tokens(tokenizer: Any) -> None:
    _, whole = answer(tokenizer, list(b"abc"), stop_token_ids=(ord("b"),))
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("a", (97, 98), "stop")
    _, whole = answer(tokenizer, list(b"abc"), ignore_eos=True, max_tokens=6)
    assert (whole.text, whole.token_ids, whole.finish_reason) == (
        "abc",
        (97, 98, 99, END, END, END),
        "length",
    )


def test_the_context_ends_an_answer_and_refuses_a_longer_prompt(tokenizer: Any) -> None:
    with Engine(ToyModel(context=20), tokenizer) as engine:
        whole = engine.submit(GenerationRequest([1] * 15, SamplingParams(seed=1, max_tokens=99))).result(
            SECONDS
        )
        assert (len(whole.token_ids), whole.finish_reason) == (5, "length")
        assert len(engine.submit(GenerationRequest([1] * 15)).result(SECONDS).token_ids) == 5
        with pytest.raises(GymError) as refused:
            engine.submit(GenerationRequest([1] * 20))
    assert refused.value.code is ErrorCode.TOO_LARGE
    assert "20 tokens" in refused.value.message
    assert "together with the answer, at most 20 are allowed" in refused.value.message


@pytest.mark.parametrize(
    "schema", [PERSON, {}, {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}]
)
def test_a_finished_value_is_one_that_the_schema_allows(tokenizer: Any, schema: Any) -> None:
    with Engine(ToyModel(context=1000), tokenizer) as engine:
        requested = [
            engine.submit(
                GenerationRequest(
                    [9, 8],
                    SamplingParams(
                        max_tokens=300, seed=seed, temperature=0.5, json_schema=json.dumps(schema)
                    ),
                )
            )
            for seed in range(6)
        ]
        plain = engine.submit(GenerationRequest([9, 8], SamplingParams(max_tokens=20, seed=1)))
        found = [one.result(SECONDS) for one in requested]
        assert plain.result(SECONDS).token_ids
    finished = [one for one in found if one.finish_reason == "stop"]
    for one in finished:
        jsonschema.validate(json.loads(one.text), schema or {"type": "object"})
    assert {one.finish_reason for one in found} <= {"stop", "length"}
    if schema:  # an open object may well go on until the last token
        assert len(finished) == len(found)


@pytest.mark.parametrize("indent", [None, 0, 2, 4, "\t"])
def test_values_may_be_laid_out_as_is_usual(tokenizer: Any, indent: Any) -> None:
    value = {"name": "Zoë", "age": 7, "tags": ["a", "b"]}
    guides = GuideFactory(TextDecoder(tokenizer), ToyModel.vocabulary, frozenset({END}))
    for text in (
        json.dumps(value, indent=indent, ensure_ascii=False),
        json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    ):
        guide = guides.guide(held_to(json.dumps(PERSON)))
        for token_id in tokenizer.encode(text):
            assert not guide.banned()[token_id]
            guide.push(token_id)
        assert guide.complete
    guide = guides.guide(held_to(json.dumps(PERSON)))
    for token_id in b"{ ":
        guide.push(token_id)
    assert guide.banned()[[ord(" "), ord("\n")]].all()


def test_a_model_that_likes_blanks_cannot_fill_its_answer_with_them(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    guide = GuideFactory(TextDecoder(tokenizer), ToyModel.vocabulary, frozenset({END})).guide(
        held_to(json.dumps({**schema, "additionalProperties": False}))
    )
    text = ""
    while not guide.complete:
        banned = guide.banned()
        # '}' before another digit; white space before everything
        text += next(letter for letter in '\n \t"a:}1{' if not banned[ord(letter)])
        guide.push(ord(text[-1]))
    assert json.loads(text) == {"a": 1}
    assert len(text) <= 7 + 5 * 9


def test_a_value_that_may_go_on_ends_with_an_end_token(tokenizer: Any) -> None:
    guides = GuideFactory(TextDecoder(tokenizer), ToyModel.vocabulary, frozenset({END}))
    guide = guides.guide(held_to('{"type": "integer"}'))
    assert guide.banned()[END]
    guide.push(ord("4"))
    assert not guide.banned()[[END, ord("2")]].any()
    assert not guide.complete
    guide.push(END)
    assert guide.complete


@pytest.mark.parametrize(
    ("schema", "code", "message"),
    [
        ("{nonsense", ErrorCode.DATA_INVALID, "not JSON"),
        ("[1]", ErrorCode.DATA_INVALID, "a JSON schema must be an object"),
        ('{"type": "strnig"}', ErrorCode.DATA_INVALID, "strnig"),
        ('{"not": {"type": "string"}}', ErrorCode.DATA_INVALID, '"not"'),
        ('{"x-guidance": {"lenient": true}, "not": {}}', ErrorCode.DATA_INVALID, '"not"'),
        ('{"$ref": "http://localhost/x"}', ErrorCode.DATA_INVALID, "http://localhost/x"),
        (" " * 300_000, ErrorCode.TOO_LARGE, "300,000"),
        ("[" * 100_000, ErrorCode.DATA_INVALID, "not JSON"),
        ('{"properties": {"a": ' * 200 + "{}" + "}}" * 200, ErrorCode.DATA_INVALID, "recursion"),
        ('{"$ref": "#"}', ErrorCode.DATA_INVALID, "cannot be enforced"),
        (
            json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(600)}}),
            ErrorCode.DATA_INVALID,
            "max is 2000",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_at_the_door(
    tokenizer: Any, schema: str, code: ErrorCode, message: str
) -> None:
    toy = ToyModel()
    with Engine(toy, tokenizer) as engine, pytest.raises(GymError) as refused:
        engine.submit(GenerationRequest([1], SamplingParams(json_schema=schema)))
    assert refused.value.code is code
    assert message in refused.value.message
    assert not toy.steps


def test_a_tokenizer_that_guides_cannot_take_is_named() -> None:
    class WordList:
        """A tokenizer that is not of the ``tokenizers`` library."""

        name_or_path = "word-list"
        added_tokens_decoder: ClassVar[dict[int, str]] = {}
        all_special_ids: ClassVar[list[int]] = []

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [4]

        def decode(self, ids: list[int], *, clean_up_tokenization_spaces: bool) -> str:
            return "word" * len(ids)

    with pytest.raises(GymError, match="WordList of word-list: only fast") as refused:
        GuideFactory(TextDecoder(WordList()), 5, frozenset({1}))
    assert refused.value.code is ErrorCode.MODEL_INVALID
