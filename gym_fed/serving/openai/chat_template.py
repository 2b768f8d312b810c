"""Prepare the inputs of a model's chat template: its variables, and message contents in the form that it expects.

Templates have two conventions for reasoning. That of gpt-oss takes ``reasoning_effort`` itself. Others have a switch:
``enable_thinking`` for Qwen3, ``thinking`` for DeepSeek and Granite.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from gym_fed.core.bounded.chat import attribute_names, template_variables
from gym_fed.data.chat_templates.parts import takes_parts
from gym_fed.serving.openai.refusals import RequestError, unsupported_parameter
from gym_fed.serving.openai.schemas import ChatRequest, Part, text_of
from gym_fed.serving.pictures.processor import NOUNS
from gym_fed.serving.reasoning.detection import THOUGHT_KEYS

_SWITCHES = ("enable_thinking", "thinking")
_LOW_EFFORTS = ("none", "minimal")
"""Values of the effort that turn reasoning off in templates with a switch."""

_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_SPECIAL = "_token"
"""Suffix of variables that contain the tokenizer's control tokens, such as ``eos_token``."""

_ARGUMENTS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of ``apply_chat_template``."""


class TemplateNames:
    """The variables of one tokenizer's chat template.

    Args:
        tokenizer: A tokenizer with one template, several or none.
    """

    def __init__(self, tokenizer: Any) -> None:
        template = tokenizer.chat_template
        self._texts = (
            list(template.values()) if isinstance(template, dict) else [template] if template else []
        )

    @cached_property
    def _names(self) -> frozenset[str]:
        """The variables that callers may set, parsed on first use so that the server starts fast."""
        names = {name for text in self._texts for name in _undeclared(text) if not name.endswith(_SPECIAL)}
        return frozenset(names) - _OWN - _ARGUMENTS

    @cached_property
    def thoughts(self) -> tuple[str, ...]:
        """The names of ``THOUGHT_KEYS`` that the template reads: Qwen3's reads ``reasoning_content``."""
        attributes = {name for text in self._texts for name in _attributes(text)}
        return tuple(name for name in THOUGHT_KEYS if name in attributes)

    def of(self, request: ChatRequest) -> dict[str, Any]:
        """Return the template variables of a request.

        Raises:
            RequestError: For a field that the template does not support.
        """
        variables = dict(request.chat_template_kwargs or {})
        for name in variables:
            if name not in self._names:
                raise _unknown(f"chat_template_kwargs.{name}", "has no such variable that requests may set")
        more = {**self._reasoning(request.reasoning_effort), **self._verbosity(request.verbosity)}
        for name, value in more.items():
            if variables.setdefault(name, value) != value:
                raise RequestError(
                    f"field 'chat_template_kwargs.{name}': it conflicts with reasoning_effort or verbosity",
                    param=f"chat_template_kwargs.{name}",
                    hint="send only one of them",
                )
        return variables

    def _reasoning(self, effort: str | None) -> Mapping[str, Any]:
        if effort is None:
            return {}
        if "reasoning_effort" in self._names:
            return {"reasoning_effort": effort}
        for switch in _SWITCHES:
            if switch in self._names:
                return {switch: effort not in _LOW_EFFORTS}
        raise _unknown("reasoning_effort", "has no variable for it")

    def _verbosity(self, verbosity: str | None) -> Mapping[str, Any]:
        if verbosity is None:
            return {}
        if "verbosity" in self._names:
            return {"verbosity": verbosity}
        if verbosity == "medium":  # the default
            return {}
        raise _unknown("verbosity", "has no variable for it")


def _attributes(template: str) -> frozenset[str]:
    """Return the names that a template may read from messages: attributes, and strings used as keys."""
    return _parsed(attribute_names, template)


def _undeclared(template: str) -> frozenset[str]:
    return _parsed(template_variables, template)


def _parsed(parse: Callable[[str], frozenset[str]], template: str) -> frozenset[str]:
    from jinja2 import TemplateError

    try:
        return parse(template)
    except TemplateError:  # every chat will be refused with the reason
        return frozenset()


def _unknown(field: str, why: str) -> RequestError:
    message = f"field {field!r} is not supported: this model's chat template {why}"
    return unsupported_parameter(field, message, "omit it")


Row = dict[str, Any]


class ContentParts:
    """Converts message contents to the form that a vision model's chat template expects: lists of parts.

    Until tools have been added to the messages, each message's content is one string. A random placeholder, which no
    client can guess, marks each medium. A test rendering shows which roles accept lists.

    Args:
        render: Function that renders messages to a text; raises ``RequestError``.
    """

    def __init__(self, render: Callable[[list[Row]], str]) -> None:
        self._render = render
        secret = secrets.token_hex(16)
        self._marks = {
            "image_url": f"<{secret}image>",
            "input_audio": f"<{secret}audio>",
            "video_url": f"<{secret}video>",
        }
        self._split = re.compile(f"<{secret}(image|audio|video)>")
        self._takes: dict[str, bool] = {}

    def marked(self, content: str | Sequence[Part] | None) -> str:
        """Return a message's content as one string, with placeholders for media."""
        return text_of(content, self._marks)

    def shaped(self, rows: list[Row]) -> list[Row]:
        """Convert rows with placeholders to the template's form.

        Raises:
            RequestError: For a picture in a message whose content must be plain text.
        """
        return [{**row, "content": self._shaped(row["role"], row["content"])} for row in rows]

    def _shaped(self, role: str, content: str) -> str | list[Row]:
        if self._takes_parts(role):
            return self._parts(content)
        if (mark := self._split.search(content)) is not None:
            raise RequestError(
                f"this model's chat template does not support {NOUNS[mark[1]]}s",
                param="messages",
                hint=f"start the server with a chat template that supports {NOUNS[mark[1]]}s (chat_template)",
            )
        return content

    def _parts(self, content: str) -> list[Row]:
        parts: list[Row] = []
        for number, text in enumerate(self._split.split(content)):  # texts and kinds alternate
            if number % 2:
                parts.append({"type": text})
            elif text:
                parts.append({"type": "text", "text": text})
        return parts or [{"type": "text", "text": ""}]

    def _takes_parts(self, role: str) -> bool:
        if role not in self._takes:
            self._takes[role] = takes_parts(self._shown, role)
        return self._takes[role]

    def _shown(self, rows: list[Row]) -> str | None:
        try:
            return self._render(rows)
        except RequestError:
            return None
