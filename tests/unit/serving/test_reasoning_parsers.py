"""Reasoning parsers: detection from published chat templates, and splitting that does not depend on the chunks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_fed.core.registries import REASONING_PARSERS
from gym_fed.serving.engine.thoughts import Thought
from gym_fed.serving.openai.tool_formats.base import CallParser
from gym_fed.serving.openai.tool_formats.harmony import Harmony
from gym_fed.serving.reasoning.answers import AnswerReader
from gym_fed.serving.reasoning.base import AnswerSplit, joined
from gym_fed.serving.reasoning.detection import name_of, reasoning_parser
from gym_fed.serving.reasoning.parsers._tags import TagSplitter
from gym_fed.serving.reasoning.parsers.openai_gptoss import HarmonySplitter, OpenAIGptOss
from tests.support.thinking_model import template_file

TAGS = ("<think>", "</think>")
PARSERS = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3",
    "qwen3_5_nothink": "qwen3",
    "qwen3_6": "qwen3",
    "nemotron_3_nano": "qwen3",
    "lfm2_2_5": "qwen3",
    "deepseek_r1_distill": "deepseek_r1",
    "deepseekv3": "deepseek_r1",
    "glm4moe": "glm45",
    "gptoss": "openai_gptoss",
    "qwen2_5": "none",
    "qwen3_instruct_2507": "none",
    "llama3_1": "none",
    "gemma3": "none",
}


@pytest.mark.parametrize("template", list(PARSERS))
def test_the_parser_follows_what_a_published_template_writes(template: str, nano_tokenizer: Any) -> None:
    before = nano_tokenizer.chat_template
    nano_tokenizer.chat_template = template_file(template).read_text(encoding="utf-8")
    try:
        assert name_of(reasoning_parser("auto", nano_tokenizer)) == PARSERS[template]
        assert reasoning_parser("none", nano_tokenizer) is None
    finally:
        nano_tokenizer.chat_template = before


def test_a_tokenizer_without_a_template_has_no_parser_but_may_be_given_one(nano_tokenizer: Any) -> None:
    before, nano_tokenizer.chat_template = nano_tokenizer.chat_template, None
    try:
        assert reasoning_parser("auto", nano_tokenizer) is None
        for name in REASONING_PARSERS.own():
            made = reasoning_parser(name, nano_tokenizer)
            assert made is not None
            assert made.closing
    finally:
        nano_tokenizer.chat_template = before


THINKING = "<think>{{ m.reasoning_content }}</think>"
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}" + THINKING + "{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("end", "thinks"),
    [
        ("{% if add_generation_prompt %}<|assistant|>{% else %}[END]{% endif %}", True),
        ("", False),  # without a generation prompt, any text could be a chat's
    ],
)
def test_only_what_follows_a_generation_prompt_is_searched_for_thoughts(
    end: str, thinks: bool, nano_tokenizer: Any
) -> None:
    before, nano_tokenizer.chat_template = nano_tokenizer.chat_template, TURNS + end
    try:
        reader = AnswerReader(nano_tokenizer)
        assert reader.thinks
        chat = nano_tokenizer.apply_chat_template(
            [{"role": "user", "content": "sum"}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert (reader.thinking(chat) is not None) == thinks
        assert reader.thinking(nano_tokenizer.encode("a text", add_special_tokens=False)) is None
    finally:
        nano_tokenizer.chat_template = before


PIECES = st.sampled_from(["a", "b ", "\n", "<", "<think>", "</think>", "</th", "think>", "é"])


def split(splitter: Any, chunks: list[str]) -> AnswerSplit:
    return joined([*map(splitter.feed, chunks), splitter.end()])


@given(st.lists(PIECES, max_size=12), st.booleans(), st.lists(st.integers(1, 5), max_size=30))
def test_tags_are_found_however_a_text_is_cut(pieces: list[str], opened: bool, cuts: list[int]) -> None:
    text, chunks = "".join(pieces), []
    rest = text
    for size in cuts:
        chunks.append(rest[:size])
        rest = rest[size:]
    whole = split(TagSplitter({}, TAGS, opened=opened), [text])
    assert split(TagSplitter({}, TAGS, opened=opened), [*chunks, rest]) == whole
    match = re.fullmatch(
        r"(?:\s*<think>)?\n*(?P<thought>.*?)</think>(?P<answer>.*)"
        if opened
        else r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)",
        text,
        re.DOTALL,
    )
    if match is not None and "<think>" not in match["thought"]:
        assert whole == (match["thought"].strip("\n"), match["answer"].lstrip("\n"))
    elif not opened and not text.lstrip().startswith("<think>"):
        assert whole == ("", text)


HARMONY = st.sampled_from(
    [
        "x",
        " ",
        "<|channel|>analysis",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "{}",
        "<|call|>",
        "<|ch",
        "x" * 300,
    ]
)


@given(st.lists(HARMONY, max_size=12), st.lists(st.integers(1, 9), max_size=30))
def test_channels_are_found_however_a_text_is_cut(pieces: list[str], cuts: list[int]) -> None:
    text, chunks = "".join(pieces), []
    rest = text
    for size in cuts:
        chunks.append(rest[:size])
        rest = rest[size:]
    made = [HarmonySplitter({}, OpenAIGptOss.marks) for _ in range(2)]
    assert split(made[0], [text]) == split(made[1], [*chunks, rest])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>only", ("", "only")),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>c<|return|>",
            ("a\nb", "c"),
        ),
        ("<|channel|>commentary<|message|>I will look.<|end|>", ("", "I will look.")),
        (
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
            ("", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
        ),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", ("1+1", "")),
        ("no channel at all", ("", "no channel at all")),
        ("<|channel|>analysis<|message|>cut", ("cut", "")),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant", ("a", "")),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final", ("a", "")),
        (f"<|channel|>final {'x' * 300}", ("", f" {'x' * 300}")),
        (f"<|channel|>analysis {'x' * 300}", (f" {'x' * 300}", "")),
        (f"<|channel|>final<|message|>a<|end|><|start|>assistant {'x' * 300}", ("", f"a {'x' * 300}")),
        ("<|channel|>final<|message|>1 <|cha", ("", "1 <|cha")),
    ],
)
def test_each_channel_goes_to_its_place(text: str, expected: tuple[str, str]) -> None:
    assert split(HarmonySplitter({}, OpenAIGptOss.marks), [text]) == expected


@pytest.mark.parametrize(
    ("text", "is_unfinished"),
    [
        ("<|channel|>analysis<|message|>a", True),
        ("<|channel|>analysis<|message|>a<|end|>", True),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final", True),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>", False),
        ("<|channel|>analysis<|message|>a<|end|><|channel|>commentary to=functions.f<|message|>{", False),
        ("<|channel|>final<|message|>a", False),
        ("plain", False),
    ],
)
def test_an_answer_is_unfinished_from_its_thought_to_its_own_message(text: str, is_unfinished: bool) -> None:
    splitter = HarmonySplitter({}, OpenAIGptOss.marks)
    split(splitter, [text])
    assert splitter.unfinished is is_unfinished


class Spelled:
    """A decoder of tokens that are listed with their texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def push(self, token_id: int) -> str:
        return self.texts[token_id]

    def skip(self) -> None:
        pass


MARK_IDS = {100 + place: mark for place, mark in enumerate(OpenAIGptOss.marks)}
START, CHANNEL, MESSAGE, _, END, CALL, _ = MARK_IDS


@pytest.mark.parametrize("text", ['see <|channel|>commentary to=functions.f<|message|>{"x":1} ok'])
def test_a_call_that_an_answer_quotes_is_text(text: str) -> None:
    for size in (1, 7, len(text)):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        stream: Any = Spelled("final", *parts)
        splitter = HarmonySplitter(MARK_IDS, ())
        ids = [CHANNEL, 0, MESSAGE, *range(1, len(parts) + 1)]
        answer = joined([*(splitter.push(token_id, stream) for token_id in ids), splitter.end()]).text
        parser = CallParser(Harmony(), {"f": {"type": "object"}})
        shown = [*parser.feed(answer), *parser.end()]
        assert "".join(map(str, shown)).replace("\u200b", "") == text
        assert all(isinstance(part, str) for part in shown)


def answer_tokens(splitter: Any, texts: list[str], ids: list[int]) -> list[int]:
    """The places of the tokens that belong to the answer."""
    parser: Any = SimpleNamespace(opening=(), closing=())
    thought = Thought(
        parser, splitter, budget=None, guide=None, end_ids=frozenset(), stop_ids=frozenset(), vocab_size=200
    )
    stream: Any = Spelled(*texts)
    for token_id in ids:
        thought.push(token_id, stream)
    thought.end()
    return [place for place in range(len(ids)) if thought.in_answer(place)]


def test_the_tokens_of_an_answer_are_those_of_its_messages() -> None:
    texts = ["analysis", "commentary", "final", "assistant", "a", "b"]
    thought, preamble, final = [CHANNEL, 0, MESSAGE, 4], [CHANNEL, 1, MESSAGE, 5], [CHANNEL, 2, MESSAGE, 5]
    turn = [END, START, 3]
    assert answer_tokens(HarmonySplitter(MARK_IDS, ()), texts, [*thought, *turn, *final]) == [10]
    whole = [*preamble, *turn, *thought, *turn, *final]
    assert answer_tokens(HarmonySplitter(MARK_IDS, ()), texts, whole) == [3, 17]


def test_the_tokens_of_an_answer_after_tags_have_exactly_its_text() -> None:
    ids, texts = {100: "<think>", 101: "</think>"}, ["\n\n", "Hi", "", "!", "<", "think>", "</think>"]
    for pushed, own in (
        ([0, 1], [0, 1]),  # no thought
        ([0, 0], [0, 1]),  # white space alone
        ([100, 1, 101, 0, 1, 0], [4, 5]),  # line breaks after a thought are dropped
        ([100, 1, 101, 0, 2, 3], [4, 5]),  # a token without text is a part of the next character
    ):
        assert answer_tokens(TagSplitter(ids, (), opened=False), texts, pushed) == own
    assert answer_tokens(TagSplitter({}, TAGS, opened=False), texts, [4, 5, 1, 6, 1]) == [4]


def test_a_stop_token_of_the_caller_stays_allowed_in_a_thought_before_a_grammar() -> None:
    parser: Any = SimpleNamespace(opening=(), closing=())
    thought = Thought(
        parser,
        TagSplitter({}, TAGS, opened=True),
        budget=None,
        guide=SimpleNamespace(),  # type: ignore[arg-type]
        end_ids=frozenset({1, 2}),
        stop_ids=frozenset({2}),
        vocab_size=4,
    )
    assert thought.banned().tolist() == [False, True, False, False]
