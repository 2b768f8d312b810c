"""Encoding: only what the assistant says is learnt, cut rows stay sound, and packing loses no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import encode_rows
from gym_fed.data.chat_templates.choice import use_chat_template
from gym_fed.data.encoding import IGNORED

CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
    ]
}


def learnt(tokenizer: Any, row: dict[str, list[int]]) -> str:
    return str(tokenizer.decode([label for label in row["labels"] if label != IGNORED]))


def test_only_the_assistants_words_and_end_tokens_are_labelled(tokenizer: Any) -> None:
    (row,) = encode_rows(tokenizer, [CHAT], max_length=100)
    assert learnt(tokenizer, row) == "a1<|im_end|>a2<|im_end|>"
    assert [label for label in row["labels"] if label != IGNORED] == [
        i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED
    ]


def test_a_template_without_generation_marks_gives_the_same_labels(tokenizer: Any) -> None:
    plain = load_tokenizer("gym-nano")
    plain.chat_template = plain.chat_template.replace("{% generation %}", "").replace(
        "{% endgeneration %}", ""
    )
    marked = encode_rows(tokenizer, [CHAT], max_length=100)[0]
    unmarked = encode_rows(plain, [CHAT], max_length=100)[0]
    assert marked["input_ids"] == unmarked["input_ids"]
    # The newline that the template puts behind an answer is not the assistant's.
    assert unmarked["labels"] == marked["labels"]


def test_rows_with_nothing_left_to_learn_are_left_out_and_all_of_them_refused(tokenizer: Any) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y"}]}
    assert len(encode_rows(tokenizer, [CHAT, long], max_length=20)) == 1
    with pytest.raises(GymError, match="max_length=20") as caught:
        encode_rows(tokenizer, [long], max_length=20)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_packing_joins_rows_with_end_tokens_and_keeps_every_token(tokenizer: Any) -> None:
    rows = [{"text": f"text number {i}"} for i in range(30)]
    packed = encode_rows(tokenizer, rows, max_length=16, packing=True)
    joined = [i for row in packed for i in row["input_ids"]]
    assert tokenizer.decode(joined) == "".join(f"text number {i}<|im_end|>" for i in range(30))
    assert {len(row["input_ids"]) for row in packed[:-1]} == {16}


def test_conversations_need_a_chat_template(tokenizer: Any) -> None:
    bare = load_tokenizer("gym-nano")
    bare.chat_template = None
    with pytest.raises(GymError, match="no chat template"):
        encode_rows(bare, [CHAT], max_length=100)


@pytest.mark.shared
def test_a_model_with_two_end_tokens_and_no_template_learns_text(shared_folder: Path) -> None:
    stories = load_tokenizer(str(shared_folder / "models" / "stories260K"))
    (row,) = encode_rows(stories, [{"text": "Once upon a time"}], max_length=64)
    assert row["labels"] == row["input_ids"]
    assert len(row["input_ids"]) > 4


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLING = {
    "messages": [
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ],
    "tools": TOOLS,
}
KNOWS_TOOLS = (
    "{% if tools %}{% for t in tools %}[{{ t['function']['name'] }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}"
    "{% endfor %}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)


def test_tools_reach_the_template_and_calls_are_learnt() -> None:
    knowing = load_tokenizer("gym-nano")
    knowing.chat_template = KNOWS_TOOLS
    plain, calling = encode_rows(knowing, [CHAT, CALLING], max_length=200)
    assert knowing.decode(calling["input_ids"]).startswith("[add]")
    assert learnt(knowing, calling) == 'add{"a": 1}<|im_end|>three<|im_end|>'
    assert "[add]" not in knowing.decode(plain["input_ids"])


def test_a_template_that_leaves_tools_out_is_refused_with_the_row(tokenizer: Any) -> None:
    with pytest.raises(GymError, match=r"row 2 has tools, but .* leaves them out"):
        encode_rows(tokenizer, [CHAT, CALLING], max_length=200)
    without = {"messages": CALLING["messages"]}
    with pytest.raises(GymError, match=r"row 3 calls tools"):
        encode_rows(tokenizer, [CHAT, CHAT, without], max_length=200)


def test_a_row_that_the_template_refuses_is_named() -> None:
    strict = load_tokenizer("gym-nano")
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + strict.chat_template
    )
    fine = {"messages": CHAT["messages"][1:]}
    with pytest.raises(GymError, match="row 2: the model's chat template rejects it: no system"):
        encode_rows(strict, [fine, CHAT], max_length=200)


def test_of_prompt_and_completion_only_the_completion_is_learnt(tokenizer: Any) -> None:
    tokenizer = use_chat_template(tokenizer, "none")
    row = {"prompt": "one plus one is", "completion": " two"}
    (encoded,) = encode_rows(tokenizer, [row], max_length=100)
    assert tokenizer.decode(encoded["input_ids"]) == "one plus one is two<|im_end|>"
    assert learnt(tokenizer, encoded) == " two<|im_end|>"
    (whole,) = encode_rows(tokenizer, [row], max_length=100, assistant_only=False)
    assert whole["labels"] == whole["input_ids"]


def test_parts_that_a_templates_text_cannot_hold_are_refused_with_the_row(tokenizer: Any) -> None:
    parts = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    row = {"messages": [parts, {"role": "assistant", "content": "a cat"}], "images": ["cat.png"]}
    with pytest.raises(GymError, match="row 2: the model's chat template rejects it") as caught:
        encode_rows(tokenizer, [CHAT, row], max_length=100)
    assert caught.value.code is ErrorCode.DATA_INVALID
