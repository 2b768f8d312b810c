"""Render a conversation with a chat template, and locate its generation marks.

The environment is transformers', with ``raise_exception``, ``tojson`` and ``strftime_now``, in the child process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gym_fed.core.bounded.chat import render_chat

Message = dict[str, Any]
Span = tuple[int, int]
"""First character and the one behind the last."""


@dataclass(frozen=True)
class Template:
    """A chat template with its variables.

    Attributes:
        source: Jinja.
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
