"""Chat fields that map to variables of the chat template, and are refused if the template has no such variable.

Templates have two conventions for reasoning. gpt-oss's take ``reasoning_effort`` itself. Others have a switch:
Qwen3's is ``enable_thinking``, DeepSeek's and Granite's ``thinking``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from gym_fed.core.bounded.chat import attribute_names, template_variables
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import ChatRequest
from gym_fed.serving.reasoning.detection import THOUGHT_KEYS

_SWITCHES = ("enable_thinking", "thinking")
_LOW_EFFORTS = ("none", "minimal")
"""Efforts that turn reasoning off in templates with a switch."""

_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_SPECIAL = "_token"
"""Suffix of variables that are the tokenizer's control tokens, such as ``eos_token``."""

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
        """The names, parsed on first use to keep the server's start fast."""
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
            RequestError: Naming the field that the template does not support.
        """
        variables = dict(request.chat_template_kwargs or {})
        for name in variables:
            if name not in self._names:
                raise _unknown(f"chat_template_kwargs.{name}", "does not have this variable for callers")
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
    """Return the names that a template may read from messages: attributes, and strings such as keys."""
    from jinja2 import TemplateError

    try:
        return attribute_names(template)
    except TemplateError:  # every chat is refused with the reason
        return frozenset()


def _undeclared(template: str) -> frozenset[str]:
    from jinja2 import TemplateError

    try:
        return template_variables(template)
    except TemplateError:  # every chat is refused with the reason
        return frozenset()


def _unknown(field: str, why: str) -> RequestError:
    return RequestError(
        f"field {field!r} is not supported: this model's chat template {why}",
        param=field,
        name="unsupported_parameter",
        hint="omit it",
    )
