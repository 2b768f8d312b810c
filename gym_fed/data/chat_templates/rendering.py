"""One call of a chat template: the text of a conversation, and where its marks lie.

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
    """A chat template, ready to write conversations.

    Attributes:
        source: Jinja.
        variables: What the template can read beside messages and tools: special tokens, switches.
    """

    source: str
    variables: dict[str, Any] = field(default_factory=dict)

    def text(self, messages: list[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """A conversation as text; ``prompt`` opens the assistant's next turn.

        Raises:
            TemplateError, TypeError: When the template refuses the conversation.
            GymError: When it exceeds a limit; see ``render_chat``.
        """
        return self._render(messages, tools, add_generation_prompt=prompt)[0]

    def marked(self, messages: list[Message], tools: Any = None) -> tuple[str, list[Span]]:
        """A conversation, and what stands between ``{% generation %}`` and ``{% endgeneration %}``."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: list[Message], tools: Any, **arguments: Any) -> tuple[str, list[Span]]:
        texts, spans = render_chat(
            conversations=[messages],
            tools=tools,
            chat_template=self.source,
            **arguments,
            **self.variables,
        )
        return texts[0], spans[0] if spans else []


def template_of(tokenizer: Any, tools: Any = None) -> Template:
    """The template that a tokenizer uses for rows with these tools."""
    source = tokenizer.get_chat_template(None, tools)
    return Template(str(source), dict(tokenizer.special_tokens_map))
