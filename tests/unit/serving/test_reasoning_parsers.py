"""Reasoning parsers: detection from published chat templates, and splitting that does not depend on the chunks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_fed.core.registries import REASONING_PARSERS
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
    ],
)
def test_each_channel_goes_to_its_place(text: str, expected: tuple[str, str]) -> None:
    assert split(HarmonySplitter({}, OpenAIGptOss.marks), [text]) == expected
