"""Resolve ``chat_template:`` (a file, Jinja source, name or ``none``) to a template, and find its end token.

Named templates use the names of LLaMA-Factory's ``template:``. Each is defined by slots around the content, from which
Jinja source with generation marks is built.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from gym_fed.core.bounded.trusted import trust_template
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.chat_templates.rendering import Message, Template, has_marks, template_of, training_template


@dataclass(frozen=True)
class NamedTemplate:
    """A chat format. In the slots, ``{bos}`` and ``{eos}`` stand for the tokenizer's tokens, and ``{}`` for the
    content.

    Attributes:
        user: The user's turn, and the text that opens the answer.
        answer: The assistant's turn: the content and its end token.
        separator: Text between an answer and the next turn.
        system: The turn of a system message.
        prefix: Text at the start of a conversation.
        default: Default system message.
        fused: True if the system message is put into the first question, before the content.
        thinks: True if answers begin with reasoning, which may be empty.
        end: The token that ends an answer; None for the tokenizer's own.
    """

    user: str
    answer: str = "{}{eos}"
    separator: str = ""
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
            "separator": "\n",
            "system": "<|im_start|>system\n{}<|im_end|>\n",
            "end": "<|im_end|>",
            **more,
        }
    )


def _gemma() -> NamedTemplate:
    return NamedTemplate(
        user="<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        answer="{}<end_of_turn>",
        separator="\n",
        system="{}\n\n",
        prefix="{bos}",
        fused=True,
        end="<end_of_turn>",
    )


NAMED: dict[str, NamedTemplate] = {
    "alpaca": NamedTemplate(
        user="### Instruction:\n{}\n\n### Response:\n",
        separator="\n\n",
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
    "default": NamedTemplate(user="Human: {}{eos}\nAssistant:", separator="\n", system="System: {}{eos}\n"),
    "gemma": _gemma(),
    "gemma3": _gemma(),
    "granite3": NamedTemplate(
        user="<|start_of_role|>user<|end_of_role|>{}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        answer="{}<|end_of_text|>",
        separator="\n",
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
        separator="\n",
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
    """Return the Jinja source of a format, with generation marks around the assistant's tokens."""
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
        f"{{%- generation -%}}{_out(slots.answer, answer)}{{%- endgeneration -%}}{_out(slots.separator, '')}"
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


_MAX_CHARACTERS = 200_000
NONE = "none"
"""The value of ``chat_template:`` that removes the template from the tokenizer."""
_TURNS: list[Message] = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "another question"},
    {"role": "assistant", "content": "another answer"},
]
_SYSTEM: Message = {"role": "system", "content": "instructions"}


def read_chat_template(value: str) -> str | None:
    """Return the Jinja source for a ``chat_template:`` value; None for ``none``.

    Raises:
        GymError: ``CONFIG_INVALID`` for an unknown name, a file that cannot be read, or Jinja that cannot render a
            conversation.
    """
    if value == NONE:
        return None
    source = _source(value)
    if len(source) > _MAX_CHARACTERS:
        raise _bad(
            f"has {counted(len(source), 'character')}, but at most {_MAX_CHARACTERS} are allowed",
            "use a shorter template",
        )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    try:
        text = Template(source, tokens).text(_TURNS)
    except (TemplateError, TypeError) as error:
        where = "" if source == value or value in NAMED else f"the file {value} "
        text = str(error)
        if isinstance(error, TemplateSyntaxError):
            text = f"{error.message}, line {error.lineno} of the template"
        raise _bad(f"{where}cannot render a conversation: {text}", "correct the template") from error
    lacking = [turn["content"] for turn in _TURNS if turn["content"] not in text]
    if lacking:
        raise _bad(
            f"omits messages: {lacking[0]!r} is missing from the text of a test conversation",
            "render the content of every message",
        )
    return source


def use_chat_template(tokenizer: Any, value: str | None) -> Any:
    """Return the tokenizer or processor with the template of ``chat_template:``; copied if anything changes.

    ``none`` removes the template. If the tokenizer's own template renders the named format, it is kept because it may
    also support tools. A processor's template is kept because it has placeholders for images.

    Raises:
        GymError: ``CONFIG_INVALID``; see ``read_chat_template``.
    """
    if value is None:
        return tokenizer
    source = read_chat_template(value)
    own = getattr(tokenizer, "chat_template", None)
    is_processor = getattr(tokenizer, "tokenizer", None) is not None
    if (
        source is not None
        and value in NAMED
        and own
        and (is_processor or _renders_the_same(tokenizer, source))
    ):
        return tokenizer
    end = NAMED[value].end if value in NAMED else None
    replaces_eos = end is not None and end in tokenizer.get_vocab()
    # A shallow copy would share the table of special tokens, so a new end token would change the original too.
    changed = copy.deepcopy(tokenizer) if replaces_eos else copy.copy(tokenizer)
    changed.chat_template = source
    if is_processor:
        changed.tokenizer = copy.copy(tokenizer.tokenizer)
        changed.tokenizer.chat_template = source
    if replaces_eos:
        changed.eos_token = end
    return changed


def _source(value: str) -> str:
    if value in NAMED:
        return named_template(value)
    if "{{" in value or "{%" in value:
        return value
    file = Path(value).expanduser()
    try:
        if file.is_file():
            if file.stat().st_size > 4 * _MAX_CHARACTERS:
                raise _bad(f"the file {value} is too large for a chat template", "use a Jinja file")
            return file.read_text(encoding="utf-8")
        if file.is_dir():
            raise _bad(f"{value} is a folder", "use the file in it, such as chat_template.jinja")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"the file {value} cannot be read: {error}", "use a Jinja file in UTF-8") from error
    near = get_close_matches(value[:200], (*NAMED, NONE), n=1)
    raise _bad(
        f"{value[:200]!r} is not a file, a Jinja template or a known name{f' (nearest: {near[0]})' if near else ''}",
        f"use a path, a template, or one of: {', '.join((*NAMED, NONE))}",
    )


def _renders_the_same(tokenizer: Any, source: str) -> bool:
    """Return True if the tokenizer's own training template renders the same text as ``source``."""
    own = template_of(tokenizer)
    trained = own.source if has_marks(own.source) else training_template(own.source) or own.source
    return all(
        _text(Template(trained, own.variables), turns) == _text(Template(source, own.variables), turns)
        for turns in (_TURNS, [_SYSTEM, *_TURNS])
    )


def _text(template: Template, messages: list[Message]) -> str | None:
    try:
        return template.text(messages)
    except (TemplateError, TypeError):
        return None


def _bad(problem: str, remedy: str) -> GymError:
    return GymError(ErrorCode.CONFIG_INVALID, f"chat_template: {problem}", remedy)


_MARK = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>\s]+?｜>|<[a-z]+(?:_[a-z]+)+>|\[/?[A-Z_]{3,}\]")
_ANSWER = "an answer 5d1e"
_PROBE_TURNS: list[Message] = [
    {"role": "system", "content": "instructions"},
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "another question"},
]
_SUGGESTED = ("chatml", "zephyr", "vicuna", "default")
"""Templates to suggest in errors, most common first."""


def end_and_marks(tokenizer: Any) -> tuple[str | None, list[str]]:
    """Return the token that ends an answer (None for the tokenizer's EOS token), and all tokens of the template."""
    template = template_of(tokenizer)
    text = None
    for turns in (_PROBE_TURNS, _PROBE_TURNS[1:]):
        try:
            text = template.text(turns, prompt=True)
        except (TemplateError, TypeError):
            continue
        break
    if text is None:
        return None, []
    marks = list(dict.fromkeys(_MARK.findall(text)))
    after_answer = text.partition(_ANSWER)[2].lstrip()
    own = tokenizer.eos_token
    end = None if own and after_answer.startswith(own) else _MARK.match(after_answer)
    return (None if end is None else end[0]), marks


def is_token(tokenizer: Any, mark: str) -> bool:
    """Return True if the tokenizer encodes ``mark`` as one token."""
    return tokenizer.convert_tokens_to_ids(mark) not in (None, tokenizer.unk_token_id)


def suggested_templates(tokenizer: Any) -> str:
    """Return named templates whose end token the tokenizer has, such as ``zephyr, vicuna or default``; empty if there
    are none."""
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # use the tokenizer of a processor
    names = [name for name in _SUGGESTED if _can_end(text_tokenizer, name)]
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _can_end(tokenizer: Any, name: str) -> bool:
    templated = use_chat_template(tokenizer, name)
    end, _ = end_and_marks(templated)
    return bool(templated.eos_token) if end is None else is_token(templated, end)
