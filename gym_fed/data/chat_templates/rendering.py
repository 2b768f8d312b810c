"""Chat templates: rendering, generation marks, and training variants with marks and earlier reasoning.

A child process renders in transformers' environment, with ``raise_exception``, ``tojson`` and ``strftime_now``.

TRL ships the chat templates of many model families, most of them with a marked copy (``NAME.jinja`` and
``NAME_training.jinja`` in ``trl/chat_templates``). While rows are encoded, a model's template that equals an
original is replaced by its marked copy. The files are read without importing TRL, which takes seconds.

Many templates drop the reasoning of earlier turns. A row that teaches reasoning needs it in its text, so it is kept: by
the template's own switch if it has one, otherwise by removing the condition from its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gym_fed.core.bounded.chat import render_chat
from gym_fed.core.bounded.trusted import trl_folder
from gym_fed.core.errors import ErrorCode, GymError

Message = dict[str, Any]
Span = tuple[int, int]
"""Positions of the first character and of the one after the last."""


@dataclass(frozen=True)
class Template:
    """A chat template with its variables.

    Attributes:
        source: The Jinja source.
        variables: Other variables of the template: special tokens, switches.
    """

    source: str
    variables: dict[str, Any] = field(default_factory=dict)

    def text(self, messages: list[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """Render a conversation; ``prompt`` adds the generation prompt.

        Raises:
            TemplateError, TypeError: When the template refuses the conversation.
            GymError: When it exceeds a limit; see ``render_chat``.
        """
        return self._render(messages, tools, add_generation_prompt=prompt)[0]

    def marked(self, messages: list[Message], tools: Any = None) -> tuple[str, list[Span]]:
        """Render a conversation, with the spans between ``{% generation %}`` and ``{% endgeneration %}``."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: list[Message], tools: Any, **arguments: Any) -> tuple[str, list[Span]]:
        texts, spans = render_chat(
            conversations=[messages], tools=tools, chat_template=self.source, **arguments, **self.variables
        )
        return texts[0], spans[0] if spans else []


def template_of(tokenizer: Any, tools: Any = None) -> Template:
    """Return the template that a tokenizer uses for rows with these tools."""
    source = tokenizer.get_chat_template(None, tools)
    return Template(str(source), dict(tokenizer.special_tokens_map))


_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SUFFIX = "_training.jinja"


def has_marks(template: str) -> bool:
    """True if the template marks the assistant's tokens itself."""
    return _MARK.search(template) is not None


def training_template(template: str) -> str | None:
    """TRL's marked copy of a template, or None if TRL has none."""
    return _counterparts().get(_key(template))


def vision_template(processor: Any) -> str | None:
    """The marked template for an image processor; None if its own has marks.

    Raises:
        GymError: ``DATA_INVALID`` when neither the processor nor TRL has one.
    """
    own = processor.chat_template
    own = own["default"] if isinstance(own, dict) else own
    if has_marks(own):
        return None
    marked = training_template(own)
    if marked is None:
        raise GymError(
            ErrorCode.DATA_INVALID,
            "the processor's chat template does not mark the assistant's words",
            "set assistant_only_loss: false, or add {% generation %} to the template",
        )
    return marked


@lru_cache(maxsize=1)
def _counterparts() -> dict[str, str]:
    counterparts = {}
    for marked in sorted(trl_templates().glob(f"*{_SUFFIX}")):
        original = marked.with_name(marked.name.removesuffix(_SUFFIX) + ".jinja")
        if original.is_file():
            counterparts[_key(original.read_text(encoding="utf-8"))] = marked.read_text(encoding="utf-8")
    return counterparts


def trl_templates() -> Path:
    """The folder of TRL's templates."""
    folder = trl_folder()
    if folder is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "the package trl is not installed", "pip install 'trl>=1.16,<1.17'"
        )
    return folder


def _key(template: str) -> str:
    """Normalise a template: Jinja drops one newline at the end of a file."""
    return template.removesuffix("\n")


_SWITCHES = {
    "truncate_history_thinking": False,  # Nemotron
    "preserve_thinking": True,  # Qwen3.6, LFM2.5, Gemma 4
    "keep_past_thinking": True,
    "clear_thinking": False,  # GLM
}
_CONDITIONS = (
    ("loop.index0 > ns.last_user_index and reasoning_content", "reasoning_content"),  # GLM-4
    ("(preserve_thinking and message.get('tool_calls'))", "preserve_thinking"),  # Gemma 4
    (
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}",
        "",
    ),  # DeepSeek
    (" and not future_final_message.found", ""),  # GPT-OSS, before tool calls
    (  # GPT-OSS, before an answer that is not the last
        '"<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>"',
        '("<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" if message.thinking '
        'else "") + "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>"',
    ),
)


def showing_history(template: Template) -> Template:
    """Return the template changed to show the reasoning of every turn, if a known condition hides it."""
    source = template.source
    for condition, instead in _CONDITIONS:
        source = source.replace(condition, instead)
    switches = {name: value for name, value in _SWITCHES.items() if name in source}
    return replace(template, source=source, variables={**template.variables, **switches})
