"""What is learned of twelve conversations under every chat template that TRL ships, written out by hand per family.

The expected words are those that the model itself has to write: reasoning, answer, calls of tools and the end token,
from where the template's generation prompt ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.rendering import trl_templates
from gym_fed.data.encoding import IGNORED, encode_one
from tests.support.conversations import CONVERSATIONS, byte_tokenizer

Format = Callable[[str, str | None, list[dict[str, Any]], bool], str]
"""From content, reasoning, calls and whether the turn is the last, to what the assistant writes."""

ORIGINALS = sorted(
    file.stem for file in trl_templates().glob("*.jinja") if not file.stem.endswith("_training")
)


def plain(end: str, last: str = "", before: str = "") -> Format:
    """Content and end token; ``last`` stands behind the conversation's last answer, ``before`` before each."""
    return lambda content, _thought, _calls, is_last: before + content + end + last * is_last


def hermes(calls: list[dict[str, Any]], before: str = "") -> str:
    """Calls as JSON between tags."""
    return "".join(
        f'{before}<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}\n</tool_call>'
        for call in calls
    )


def in_tags(calls: list[dict[str, Any]]) -> str:
    """Calls with a tag for each parameter."""
    return "".join(
        f"<tool_call>\n<function={call['name']}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call["arguments"].items())
        + "</function>\n</tool_call>"
        for call in calls
    )


def qwen3(content: str, thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
    return f"<think>\n{thought or ''}\n</think>\n\n{content}{hermes(calls)}<|im_end|>"


def qwen3_5_think(content: str, thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
    return f"{thought or ''}\n</think>\n\n{content}{in_tags(calls)}<|im_end|>"


def qwen3_5_nothink(content: str, thought: str | None, calls: list[dict[str, Any]], last: bool) -> str:
    """The prompt holds an empty thought, so an answer without one is learned alone."""
    empty = "\n</think>\n\n"
    return qwen3_5_think(content, thought, calls, last).removeprefix("" if thought else empty)


def nemotron(between: str) -> Format:
    def written(content: str, thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
        opened = f"\n{thought}{between}</think>" if thought else "</think>"
        opened += "\n" if thought and between else ""
        if not calls:
            return f"{opened}{content}<|im_end|>".removeprefix("\n")
        return f"{opened.rstrip()}\n{in_tags(calls)}\n<|im_end|>".removeprefix("\n")

    return written


def r1(content: str, thought: str | None, _calls: list[dict[str, Any]], _last: bool) -> str:
    return (f"{thought}\n</think>\n\n" if thought else "") + content + "<｜end▁of▁sentence｜>"


def glm4(content: str, thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
    """The token that ends a turn is the one that opens the next: a question or a tool's result."""
    said = f"\n<think>{thought or ''}</think>" + (f"\n{content}" if content else "")
    for call in calls:
        pairs = (
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in call["arguments"].items()
        )
        said += f"\n<tool_call>{call['name']}\n{''.join(pairs)}</tool_call>"
    return said + ("<|observation|>" if calls else "<|user|>")


def gpt_oss(content: str, thought: str | None, calls: list[dict[str, Any]], last: bool) -> str:
    messages = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
    for call in calls:
        messages.append(
            f" to=functions.{call['name']}<|channel|>commentary json<|message|>{json.dumps(call['arguments'])}<|call|>"
        )
    if not calls:
        messages.append(f"<|channel|>final<|message|>{content}" + ("<|return|>" if last else "<|end|>"))
    return "<|start|>assistant".join(messages)


def muse(content: str, thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
    messages = [f" to=self<|message|>{thought}<|eom|>"] if thought else []
    for call in calls:
        pairs = "".join(
            f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in call["arguments"].items()
        )
        messages.append(
            f' to={call["name"]}<|message|><atem:function_calls>\n<atem:invoke name="{call["name"]}">\n{pairs}'
            "</atem:invoke>\n</atem:function_calls><|eot|>"
        )
    if not calls:
        messages.append(f" to=user<|message|>{content}<|eot|>")
    return "<|start|>assistant".join(messages)


def gemma4(after_call: str) -> Format:
    def written(content: str, thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
        said = f"<|channel>thought\n{thought}\n<channel|>" if thought else ""
        for call in calls:
            pairs = ",".join(f'{k}:<|"|>{v}<|"|>' for k, v in call["arguments"].items())
            said += f"<|tool_call>call:{call['name']}{{{pairs}}}<tool_call|>"
        return said + (after_call if calls else f"{content}<turn|>")

    return written


def lfm2(content: str, thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
    said = f"<think>{thought}</think>" if thought else ""
    for call in calls:
        pairs = ", ".join(f"{k}='{v}'" for k, v in call["arguments"].items())
        said += f"<|tool_call_start|>[{call['name']}({pairs})]<|tool_call_end|>"
    return f"{said}{content}<|im_end|>"


def llama3_1(content: str, _thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
    for call in calls:
        return f'{{"name": "{call["name"]}", "parameters": {json.dumps(call["arguments"])}}}<|eot_id|>'
    return f"{content}<|eot_id|>"


def chatml(content: str, _thought: str | None, calls: list[dict[str, Any]], _last: bool) -> str:
    return f"{content}{hermes(calls)}<|im_end|>"


FORMATS: dict[str, Format] = {
    "cohere": plain("<|END_OF_TURN_TOKEN|>"),
    "cohere2": plain("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseek_r1_distill": r1,
    "deepseekv3": r1,
    "diffusion_gemma": gemma4(""),
    "gemma": plain("<end_of_turn>"),
    "gemma3": plain("<end_of_turn>"),
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), gemma4("<|tool_response>")),
    "gemma4_v2": gemma4("<turn|>"),
    "glm4moe": glm4,
    "gptoss": gpt_oss,
    "idefics3": plain("<end_of_utterance>", before=" "),
    **dict.fromkeys(("lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), lfm2),
    "llama3": plain("<|eot_id|>"),
    "llama3_1": llama3_1,
    "llama3_2": llama3_1,
    "llava_next": plain("</s>", before=" "),
    "muse_glimmer": muse,
    "nemotron_3_nano": nemotron("\n"),
    "nemotron_3_super": nemotron("\n"),
    "nemotron_3_ultra": nemotron(""),
    "nemotron_3_5_lightning": nemotron(""),
    "phi3": plain("<|end|>", last="</s>"),
    "phi3_5": plain("<|end|>", last="</s>"),
    "qwen2_5": chatml,
    "qwen2_5_vl": chatml,
    "qwen3": qwen3,
    "qwen3_5_nothink": qwen3_5_nothink,
    "qwen3_5_think": qwen3_5_think,
    "qwen3_6": qwen3_5_think,
    "qwen3_8": qwen3_5_think,
    "qwen3_instruct_2507": chatml,
    "qwen3_vl": chatml,
    "smolvlm": plain("<end_of_utterance>", before=" "),
}

THINKING = {"reasoning", "reasoning, two turns", "tools and reasoning, two turns"}
CALLING = {"tools", "tools and reasoning, two turns"}
IN_A_ROW = {"two answers in a row"}
REFUSED: dict[str, set[str]] = {
    **dict.fromkeys(("cohere", "cohere2", "gemma3"), THINKING | CALLING | IN_A_ROW),
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), CALLING),
    "gemma": THINKING | CALLING | IN_A_ROW | {"system", "empty system"},
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4"), THINKING | IN_A_ROW),
    "gemma4_v5": IN_A_ROW,
    **dict.fromkeys(("idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5"), THINKING | CALLING),
    **dict.fromkeys(("qwen2_5_vl", "smolvlm"), THINKING | CALLING),
    **dict.fromkeys(("gemma4_v2", "lfm2_v2", "llama3_1", "llama3_2"), THINKING),
    **dict.fromkeys(("qwen2_5", "qwen3_instruct_2507", "qwen3_vl"), THINKING),
}
"""What a template refuses, or leaves out and is refused for; everything else is learned."""

PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take a content as a list of parts alone."""


def source(name: str) -> str:
    return (trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")


def row_for(name: str, conversation: str) -> dict[str, Any]:
    row = CONVERSATIONS[conversation]
    if name not in PARTS:
        return row
    messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in row["messages"]]
    return {**row, "messages": messages}


def expected(name: str, conversation: str) -> str:
    messages = CONVERSATIONS[conversation]["messages"]
    return "".join(
        FORMATS[name](
            message["content"],
            message.get("reasoning_content"),
            [call["function"] for call in message.get("tool_calls", ())],
            number == len(messages) - 1,
        )
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    )


def learned(tokenizer: Any, row: dict[str, Any], **options: Any) -> str:
    encoded = encode_one(tokenizer, row, **options)
    assert all(label in (IGNORED, token) for token, label in zip(*encoded.values(), strict=True))
    return str(tokenizer.decode([label for label in encoded["labels"] if label != IGNORED]))


def test_every_template_of_trl_is_here() -> None:
    assert sorted(FORMATS) == ORIGINALS
    assert len(CONVERSATIONS) == 12


@pytest.mark.few(14, "one learner for every template")
@pytest.mark.parametrize("name", ORIGINALS)
def test_what_is_learned_of_twelve_conversations_is_what_the_assistant_wrote(name: str) -> None:
    tokenizer = byte_tokenizer(source(name))
    for conversation in CONVERSATIONS:
        row = row_for(name, conversation)
        if conversation in REFUSED.get(name, ()):
            with pytest.raises(GymError, match="row 1") as caught:
                encode_one(tokenizer, row)
            assert caught.value.code is ErrorCode.DATA_INVALID
        else:
            wanted = expected(name, conversation)
            if (name, conversation) == ("diffusion_gemma", "two answers in a row"):
                wanted = wanted.replace("<turn|>", "", 1)  # two answers are one turn there
            assert learned(tokenizer, row) == wanted, conversation


@pytest.mark.parametrize(
    "name", ["deepseek_r1_distill", "deepseekv3", "glm4moe", "gptoss", "qwen2_5", "qwen3"]
)
def test_of_an_answer_that_nobody_asked_for_the_header_is_not_learned(name: str) -> None:
    said = [("assistant", "Ask me."), ("user", "Why?"), ("assistant", "Because.")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    wanted = FORMATS[name]("Ask me.", None, [], False) + FORMATS[name]("Because.", None, [], True)
    assert learned(byte_tokenizer(source(name)), row) == wanted


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize(
    ("weights", "wanted"), [((1, 1), "Six."), ((0, 1), "Six."), ((1, 0), ""), ((0, 0), "")]
)
def test_a_last_answer_of_weight_0_is_not_learned_under_mask_history(
    name: str, weights: tuple[int, int], wanted: str
) -> None:
    messages = [dict(message) for message in CONVERSATIONS["two turns"]["messages"]]
    messages[1]["weight"], messages[3]["weight"], messages[3]["content"] = *weights, "Six."
    whole = FORMATS[name](wanted, None, [], True) if wanted else ""
    assert learned(byte_tokenizer(source(name)), {"messages": messages}, mask_history=True) == whole


HIDES_HISTORY = ("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")
"""Their own templates leave the thoughts, empty ones too, out of earlier turns."""


@pytest.mark.parametrize("name", [n for n in ORIGINALS if n not in PARTS])
def test_the_text_trained_on_is_the_model_s_own_where_that_shows_the_whole_conversation(name: str) -> None:
    tokenizer = byte_tokenizer(source(name))
    compared = 0
    for conversation, row in CONVERSATIONS.items():
        if conversation in REFUSED.get(name, set()) | THINKING | CALLING:
            continue
        if name in HIDES_HISTORY and ("turns" in conversation or conversation in IN_A_ROW):
            continue
        try:
            own = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        except TemplateError:
            continue
        seen = tokenizer.decode(encode_one(tokenizer, row)["input_ids"])
        if name == "glm4moe":  # the end token of the last turn, and of the one before
            seen = seen.removesuffix("<|user|>").replace("<|user|><|assistant|>", "<|assistant|>")
        assert seen == own, conversation
        compared += 1
    assert compared >= 4


def table() -> str:
    """The templates as Markdown, by the conversations that they refuse; all others are learned word for word."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in ORIGINALS:
        refused = tuple(
            conversation for conversation in CONVERSATIONS if conversation in REFUSED.get(name, ())
        )
        groups.setdefault(refused, []).append(f"`{name}`")
    lines = ["| templates | refused |", "|---|---|"]
    lines += [
        f"| {', '.join(names)} | {'; '.join(refused) or 'nothing'} |" for refused, names in groups.items()
    ]
    return "\n".join(lines) + "\n"


def test_the_table_of_the_documentation_is_what_is_tested_here() -> None:
    page = Path(__file__).parents[3] / "docs" / "chat-templates.md"
    assert table() in page.read_text(encoding="utf-8"), f"put this into {page}:\n{table()}"


THOUGHT_MASKED = {
    "messages": [
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "reasoning_content": "4 is",
            "content": "so 4 is it",
            "masked": {"reasoning_content": [[0, 1]]},
        },
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
}


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "qwen3"])
def test_masked_reasoning_is_that_of_the_thought_and_not_of_the_same_words_in_the_answer(name: str) -> None:
    text = learned(byte_tokenizer(source(name)), THOUGHT_MASKED)
    thought, _, answer = text.partition("</think>")
    assert thought.replace("<think>", "").split() == ["is"]
    assert "so 4 is it" in answer
    dropped = learned(byte_tokenizer(source(name)), THOUGHT_MASKED, reasoning="drop")
    assert "so 4 is it" in dropped


def test_end_tokens_of_all_turns_take_two_renderings_of_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gym_fed.data.chat_templates.rendering import Template

    calls, render = [], Template.text

    def counted(self: Template, *args: Any, **more: Any) -> str:
        calls.append(1)
        return render(self, *args, **more)

    monkeypatch.setattr(Template, "text", counted)
    tokenizer = byte_tokenizer(source("qwen3"))
    turns = [{"role": "user", "content": f"q{n}"} for n in range(20)]
    row = {"messages": [*turns, {"role": "assistant", "content": "a"}]}
    learned(tokenizer, row)
    before = len(calls)
    learned(tokenizer, {**row, "train_on_eos": "all"})
    assert len(calls) - 2 * before <= 2 * len(turns)
