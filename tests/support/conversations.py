"""Twelve hand-written conversations, and a byte-level tokenizer that knows the special tokens of a chat template."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}},
                "required": ["city"],
            },
        },
    }
]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, thought: str | None = None) -> dict[str, Any]:
    thinking = {} if thought is None else {"reasoning_content": thought}
    return {"role": "assistant", "content": text, **thinking}


def call(city: str, thought: str | None = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {**answer("", thought), "tool_calls": [{"type": "function", "function": function}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "content": text}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [user("What is the capital of Peru?"), answer("Lima.")]},
    "two turns": {
        "messages": [user("Name a colour."), answer("Teal."), user("Another one?"), answer("Ochre.")]
    },
    "three turns": {
        "messages": [
            *(user("Count with me: one."), answer("Two.")),
            *(user("Three."), answer("Four.")),
            *(user("Five."), answer("Six.")),
        ]
    },
    "system": {"messages": [system("Answer in one word."), user("Is snow warm?"), answer("No.")]},
    "two answers in a row": {
        "messages": [user("A cat?"), answer("It sat on a mat."), answer("And then it left.")]
    },
    "empty system": {"messages": [system(""), user("Say when."), answer("When.")]},
    "unicode": {"messages": [user("¿Cómo se dice «дом»? 🏠"), answer("En español: «casa» — 家, 집, 🏡.")]},
    "lines and brackets": {
        "messages": [user("Write a list.\n"), answer("1. <b>one</b>\n\n2. [two] {three}\n   four > 3")]
    },
    "reasoning": {
        "messages": [user("What is 17 times 3?"), answer("The product is 51.", "10*3=30, 7*3=21; 30+21=51")]
    },
    "reasoning, two turns": {
        "messages": [
            *(user("What is 2 + 2?"), answer("Four.", "two pairs make a square")),
            *(user("And 3 + 3?"), answer("Six.", "twice a triangle")),
        ]
    },
    "tools": {
        "messages": [
            *(user("Is it raining in Oslo?"), call("Oslo")),
            *(result("rain, 7 degrees"), answer("Yes, it rains in Oslo.")),
        ],
        "tools": TOOLS,
    },
    "tools and reasoning, two turns": {
        "messages": [
            *(user("Is it cold in Rome?"), call("Rome", "I have to look it up")),
            *(result("sun, 29 degrees"), answer("No, it is warm.", "29 degrees are warm")),
            *(user("Thank you!"), answer("At your service.", "a kind word needs one")),
        ],
        "tools": TOOLS,
    },
}

_SPECIAL = re.compile(
    r"<\|[\w/. -]+\|>|<｜[^<>'\"{}]+?｜>|<(?:start|end)_of_turn>|<\|[\w]+>|<[\w]+\|>|</?think>|</?tool_call>|"
    r"\[gMASK\]|<sop>|<end_of_utterance>|<fake_token_around_image>|<image>"
)


def byte_tokenizer(template: str | None, *more: str, bos: str = "<s>", eos: str = "</s>") -> Any:
    """One token a byte, and one for each special token that the template names."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos)
    found = sorted({bos, eos, *more, *_SPECIAL.findall(template or "")})
    tokenizer.add_special_tokens({"additional_special_tokens": found})
    tokenizer.chat_template = template
    return tokenizer
