"""Named chat templates for tokenizers without one, by the names of LLaMA-Factory's ``template:``.

Each is written out here as slots around the content, from which the Jinja is made, marks included. LLaMA-Factory writes
a question's slot with the header of its answer, so a question always ends with the answer's header.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from gym_fed.core.bounded.trusted import trust_template


@dataclass(frozen=True)
class NamedTemplate:
    """A chat format. ``{bos}`` and ``{eos}`` stand for the tokenizer's tokens, ``{}`` for the content.

    Attributes:
        user: A question, and what opens the answer.
        answer: The assistant's turn: the content and its end token.
        behind: Text after an answer.
        system: A system message.
        prefix: Text at the start of a conversation.
        default: The system message of a conversation without one.
        fused: True if the system message is put into the first question, before its content.
        thinks: Whether answers begin with their reasoning, an empty one where there is none.
        end: The token that ends an answer; None for the tokenizer's own.
    """

    user: str
    answer: str = "{}{eos}"
    behind: str = ""
    system: str = "{}"
    prefix: str = ""
    default: str = ""
    fused: bool = False
    thinks: bool = False
    end: str | None = None


def _chatml(**more: object) -> NamedTemplate:
    return NamedTemplate(
        **{  # type: ignore[arg-type]  # keys of the class
            "user": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
            "answer": "{}<|im_end|>",
            "behind": "\n",
            "system": "<|im_start|>system\n{}<|im_end|>\n",
            "end": "<|im_end|>",
            **more,
        }
    )


def _gemma() -> NamedTemplate:
    return NamedTemplate(
        user="<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        answer="{}<end_of_turn>",
        behind="\n",
        system="{}\n\n",
        prefix="{bos}",
        fused=True,
        end="<end_of_turn>",
    )


NAMED: dict[str, NamedTemplate] = {
    "alpaca": NamedTemplate(
        user="### Instruction:\n{}\n\n### Response:\n",
        behind="\n\n",
        default="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n",
    ),
    "chatml": _chatml(),
    "chatml_de": _chatml(default="Du bist ein freundlicher und hilfsbereiter KI-Assistent."),
    "cohere": NamedTemplate(
        user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        prefix="{bos}",
    ),
    "deepseek": NamedTemplate(user="User: {}\n\nAssistant:", system="{}\n\n", prefix="{bos}"),
    "deepseek3": NamedTemplate(user="<｜User｜>{}<｜Assistant｜>", prefix="{bos}"),
    "deepseekr1": NamedTemplate(user="<｜User｜>{}<｜Assistant｜>", prefix="{bos}", thinks=True),
    "default": NamedTemplate(user="Human: {}{eos}\nAssistant:", behind="\n", system="System: {}{eos}\n"),
    "gemma": _gemma(),
    "gemma3": _gemma(),
    "granite3": NamedTemplate(
        user="<|start_of_role|>user<|end_of_role|>{}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        answer="{}<|end_of_text|>",
        behind="\n",
        system="<|start_of_role|>system<|end_of_role|>{}<|end_of_text|>\n",
    ),
    "llama2": NamedTemplate(user="{bos}[INST] {} [/INST]", system="<<SYS>>\n{}\n<</SYS>>\n\n", fused=True),
    "llama3": NamedTemplate(
        user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        answer="{}<|eot_id|>",
        system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        prefix="{bos}",
        end="<|eot_id|>",
    ),
    "mistral": NamedTemplate(
        user="[INST] {}[/INST]", answer=" {}{eos}", system="{}\n\n", prefix="{bos}", fused=True
    ),
    "olmo": NamedTemplate(user="<|user|>\n{}<|assistant|>\n", prefix="{eos}"),
    "openchat": NamedTemplate(user="GPT4 Correct User: {}{eos}GPT4 Correct Assistant:", prefix="{bos}"),
    "phi": NamedTemplate(
        user="<|user|>\n{}<|end|>\n<|assistant|>\n",
        answer="{}<|end|>",
        behind="\n",
        system="<|system|>\n{}<|end|>\n",
        end="<|end|>",
    ),
    "phi4": NamedTemplate(
        user="<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>",
        answer="{}<|im_end|>",
        system="<|im_start|>system<|im_sep|>{}<|im_end|>",
        end="<|im_end|>",
    ),
    "qwen": _chatml(default="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": _chatml(thinks=True),
    "qwen3_nothink": _chatml(),
    "smollm": _chatml(end=None),
    "smollm2": _chatml(
        end=None, default="You are a helpful AI assistant named SmolLM, trained by Hugging Face."
    ),
    "vicuna": NamedTemplate(
        user="USER: {} ASSISTANT:",
        default="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    "yi": _chatml(end=None),
    "zephyr": NamedTemplate(
        user="<|user|>\n{}{eos}<|assistant|>\n",
        system="<|system|>\n{}{eos}",
        default="You are Zephyr, a helpful assistant.",
    ),
}


@cache
def named_template(name: str) -> str:
    """Return the Jinja source of a format, with the assistant's tokens marked."""
    slots = NAMED[name]
    question = "message['content']"
    if slots.fused:
        question = f"((({_joined(slots.system, 'system')}) if system and loop.first else '') ~ {question})"
    answer = "message['content']"
    if slots.thinks:
        answer = f"(thought ~ {answer})"
    system = "" if slots.fused else f"{{%- if system -%}}{_out(slots.system, 'system')}{{%- endif -%}}"
    return trust_template(
        f"{{%- set system = {_literal(slots.default)} -%}}{{%- set turns = messages -%}}"
        "{%- if messages and messages[0]['role'] == 'system' -%}"
        "{%- set system = messages[0]['content'] or system -%}{%- set turns = messages[1:] -%}{%- endif -%}"
        f"{_out(slots.prefix, '')}{system}"
        "{%- for message in turns -%}{%- if message['role'] == 'user' -%}"
        f"{_out(slots.user, question)}"
        "{%- elif message['role'] == 'assistant' -%}"
        f"{_THOUGHT if slots.thinks else ''}"
        f"{{%- generation -%}}{_out(slots.answer, answer)}{{%- endgeneration -%}}{_out(slots.behind, '')}"
        "{%- else -%}{{- raise_exception('no ' ~ message['role'] ~ ' messages in this template') -}}{%- endif -%}"
        "{%- endfor -%}"
    )


_THOUGHT = (
    "{%- set thought = '' -%}{%- if message['reasoning_content'] -%}"
    r"{%- set thought = '<think>\n' ~ message['reasoning_content'] ~ '\n</think>\n\n' -%}"
    "{%- elif '<think>' not in message['content'] and '</think>' not in message['content'] -%}"
    r"{%- set thought = '<think>\n\n</think>\n\n' -%}{%- endif -%}"
)


def _out(slot: str, content: str) -> str:
    return f"{{{{- {_joined(slot, content)} -}}}}" if slot else ""


def _joined(slot: str, content: str) -> str:
    """Convert a slot to a Jinja expression of literals, ``{}``, ``{bos}`` and ``{eos}``."""
    parts = []
    for name, expression in (("{bos}", "(bos_token | default(''))"), ("{eos}", "(eos_token | default(''))")):
        slot = slot.replace(name, f"\0{expression}\0")
    for number, part in enumerate(slot.replace("{}", f"\0{content}\0").split("\0")):
        if part:
            parts.append(part if number % 2 else _literal(part))
    return " ~ ".join(parts) or "''"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
