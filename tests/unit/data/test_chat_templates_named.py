"""Templates by name: token ids equal to LLaMA-Factory's slots put together one by one, and to what was recorded."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.choice import NAMED, use_chat_template
from gym_fed.data.encoding import IGNORED, encode_one
from gym_fed.interop.llamafactory.translate import translate
from tests.support.conversations import answer, byte_tokenizer, system, user

TOKENS = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|im_sep|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>", "<|assistant|>", "<|system|>"),
    *("<|end|>", "<think>", "</think>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
)
BOS, EOS = "<s>", "</s>"
TURNS = [("Name a colour.", "Teal."), ("¿Otro?\n", "Ocre: «🎨»\n- one")]
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def chatml(instructions: str) -> list[str]:
    said = [f"<|im_start|>system\n{instructions}<|im_end|>\n"] if instructions else []
    for question, reply in TURNS:
        said += [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", f"{reply}<|im_end|>\n"]
    return said


def fused(before: str, question: str, instructions: str, form: str) -> list[str]:
    said = [before]
    for number, (asked, reply) in enumerate(TURNS):
        text = form.format(instructions) if instructions and number == 0 else ""
        said += [question.replace("{}", text + asked)]
        said += [reply]
    return said


def turns(question: str, reply: str = "{}" + EOS) -> list[str]:
    return [
        part for asked, said in TURNS for part in (question.replace("{}", asked), reply.replace("{}", said))
    ]


def slots(name: str, instructions: str) -> list[str]:
    """The pieces that LLaMA-Factory tokenises one by one, written down from its documented formats."""
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    gemma = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
    role = "<|start_of_role|>{}<|end_of_role|>"
    cohere = (
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    )
    s = instructions
    return {
        "alpaca": lambda: [s or ALPACA, *turns("### Instruction:\n{}\n\n### Response:\n", "{}</s>\n\n")],
        "chatml": lambda: chatml(s),
        "chatml_de": lambda: chatml(s or "Du bist ein freundlicher und hilfsbereiter KI-Assistent."),
        "cohere": lambda: [
            BOS,
            f"<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{s}<|END_OF_TURN_TOKEN|>" if s else "",
            *turns(cohere),
        ],
        "deepseek": lambda: [BOS, f"{s}\n\n" if s else "", *turns("User: {}\n\nAssistant:")],
        "deepseek3": lambda: [BOS, s, *turns("<｜User｜>{}<｜Assistant｜>")],
        "deepseekr1": lambda: [
            *(BOS, s),
            *turns("<｜User｜>{}<｜Assistant｜>", "<think>\n\n</think>\n\n{}</s>"),
        ],
        "default": lambda: [
            f"System: {s}</s>\n" if s else "",
            *turns("Human: {}</s>\nAssistant:", "{}</s>\n"),
        ],
        "gemma": lambda: [
            f"{part}<end_of_turn>\n" if number and number % 2 == 0 else part
            for number, part in enumerate(fused(BOS, gemma, s, "{}\n\n"))
        ],
        "granite3": lambda: [
            f"{role.format('system')}{s}<|end_of_text|>\n" if s else "",
            *turns(
                f"{role.format('user')}{{}}<|end_of_text|>\n{role.format('assistant')}", "{}<|end_of_text|>\n"
            ),
        ],
        "llama2": lambda: [
            f"{part}</s>" if number and number % 2 == 0 else part
            for number, part in enumerate(fused("", "<s>[INST] {} [/INST]", s, "<<SYS>>\n{}\n<</SYS>>\n\n"))
        ],
        "llama3": lambda: [
            BOS,
            f"{header.format('system')}{s}<|eot_id|>" if s else "",
            *turns(f"{header.format('user')}{{}}<|eot_id|>{header.format('assistant')}", "{}<|eot_id|>"),
        ],
        "mistral": lambda: [
            f" {part}</s>" if number and number % 2 == 0 else part
            for number, part in enumerate(fused(BOS, "[INST] {}[/INST]", s, "{}\n\n"))
        ],
        "olmo": lambda: [EOS, s, *turns("<|user|>\n{}<|assistant|>\n")],
        "openchat": lambda: [BOS, s, *turns("GPT4 Correct User: {}</s>GPT4 Correct Assistant:")],
        "phi": lambda: [
            f"<|system|>\n{s}<|end|>\n" if s else "",
            *turns("<|user|>\n{}<|end|>\n<|assistant|>\n", "{}<|end|>\n"),
        ],
        "phi4": lambda: [
            f"<|im_start|>system<|im_sep|>{s}<|im_end|>" if s else "",
            *turns("<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>", "{}<|im_end|>"),
        ],
        "qwen": lambda: chatml(s or "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        "qwen3": lambda: [
            f"<think>\n\n</think>\n\n{part}" if part.startswith(tuple(reply for _, reply in TURNS)) else part
            for part in chatml(s)
        ],
        "smollm2": lambda: chatml(
            s or "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
        ),
        "vicuna": lambda: [s or VICUNA, *turns("USER: {} ASSISTANT:")],
        "zephyr": lambda: [
            f"<|system|>\n{s or 'You are Zephyr, a helpful assistant.'}</s>",
            *turns("<|user|>\n{}</s><|assistant|>\n"),
        ],
    }[{"gemma3": "gemma", "qwen3_nothink": "chatml", "smollm": "chatml", "yi": "chatml"}.get(name, name)]()


RECORDED: dict[str, str] = {
    "alpaca": "586c0f833472",
    "chatml": "1fbdb412055c",
    "chatml_de": "1fbdb412055c",
    "cohere": "41e00eb2ffe6",
    "deepseek": "7d103c2db603",
    "deepseek3": "43acecbb67a2",
    "deepseekr1": "0b66995702da",
    "default": "6697d747a46c",
    "gemma": "984a28d60b54",
    "gemma3": "984a28d60b54",
    "granite3": "1bbb7b91ef01",
    "llama2": "714a7a9a4ed8",
    "llama3": "c69c329d7759",
    "mistral": "b7a90faf4613",
    "olmo": "cf36471c7756",
    "openchat": "4944656fdbd5",
    "phi": "494817615a7c",
    "phi4": "2873637dffc5",
    "qwen": "1fbdb412055c",
    "qwen3": "1e4a5261deda",
    "qwen3_nothink": "1fbdb412055c",
    "smollm": "1fbdb412055c",
    "smollm2": "1fbdb412055c",
    "vicuna": "cde7353db7f2",
    "yi": "1fbdb412055c",
    "zephyr": "ea29b6a2742d",
}
"""First twelve digits of the SHA-256 of the ids, so that no change of the formats goes unseen."""


def bare() -> Any:
    return byte_tokenizer(None, *TOKENS, bos=BOS, eos=EOS)


def row(instructions: str) -> dict[str, Any]:
    said = [message for question, reply in TURNS for message in (user(question), answer(reply))]
    return {"messages": [system(instructions), *said] if instructions else said}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("instructions", ["", "Be brief."])
def test_a_tokenizer_without_a_template_gives_the_ids_of_the_named_format(
    name: str, instructions: str
) -> None:
    plain = bare()
    wanted = [
        token
        for part in slots(name, instructions)
        for token in plain(part, add_special_tokens=False)["input_ids"]
    ]
    encoded = encode_one(use_chat_template(plain, name), row(instructions))
    assert plain.decode(encoded["input_ids"]) == plain.decode(wanted)
    assert encoded["input_ids"] == wanted
    learned = plain.decode([label for label in encoded["labels"] if label != IGNORED])
    assert all(reply in learned for _, reply in TURNS)
    assert not any(question.strip() in learned for question, _ in TURNS)


@pytest.mark.parametrize("name", NAMED)
def test_the_ids_of_a_named_format_are_those_recorded(name: str) -> None:
    ids = encode_one(use_chat_template(bare(), name), row("Be brief."))["input_ids"]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12] == RECORDED[name]


def test_there_are_twenty_names_and_others_are_refused_with_the_list() -> None:
    assert len(NAMED) >= 20
    with pytest.raises(GymError, match="or a known name") as caught:
        use_chat_template(bare(), "qwen33")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "qwen3, " in caught.value.hint
    assert "(nearest: qwen3)" in caught.value.message


def test_a_file_that_is_no_template_is_refused_by_its_name_and_line(tmp_path: Any) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(GymError, match=r"the file .*broken\.jinja cannot render .*, line 2 of the template"):
        use_chat_template(bare(), str(broken))
    with pytest.raises(GymError, match="is a folder") as caught:
        use_chat_template(bare(), str(tmp_path))
    assert "chat_template.jinja" in caught.value.hint


def test_rows_that_need_a_template_name_the_key_that_gives_one() -> None:
    with pytest.raises(GymError, match="no chat template") as caught:
        encode_one(bare(), row("Be brief."))
    assert "chat_template" in caught.value.hint


def test_a_name_of_llamafactory_becomes_ours_and_an_unknown_one_needs_a_template_of_the_tokenizer(
    tmp_path: Any,
) -> None:
    theirs = {"model_name_or_path": "gym-nano", "stage": "sft", "mask_history": True}
    found = translate({**theirs, "template": "qwen3"})
    assert (found.values["chat_template"], found.values["mask_history"]) == ("qwen3", True)
    assert "template" in translate({**theirs, "template": "glm4"}).notes
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    lost = translate({**theirs, "model_name_or_path": str(tmp_path), "template": "glm4"}).lost
    assert "qwen3" in lost["template"]
