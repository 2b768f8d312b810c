"""Convert message contents to the form that a vision model's chat template takes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import ImagePart, TextPart, text_of

Row = dict[str, Any]

_PROBE = "a probe of parts"


class ContentParts:
    """Converts message contents to the form that a vision model's chat template takes: lists of text and image parts.

    Until tools have been added to the messages, each message's content is one string, with a random placeholder for
    each picture that no client can guess. Rendering a list shows which roles take lists.

    Args:
        render: Function that renders messages to a text; raises ``RequestError``.
    """

    def __init__(self, render: Callable[[list[Row]], str]) -> None:
        self._render = render
        self._picture = f"<{secrets.token_hex(16)}>"
        self._takes: dict[str, bool] = {}

    def marked(self, content: str | Sequence[TextPart | ImagePart] | None) -> str:
        """Return a message's content as one string, with placeholders for pictures."""
        return text_of(content, self._picture)

    def shaped(self, rows: list[Row]) -> list[Row]:
        """Convert rows with placeholders to the template's form.

        Raises:
            RequestError: For a picture in a message whose content must be plain text.
        """
        return [{**row, "content": self._shaped(row["role"], row["content"])} for row in rows]

    def _shaped(self, role: str, content: str) -> str | list[Row]:
        if self._takes_parts(role):
            return self._parts(content)
        if self._picture in content:
            raise RequestError(
                "this model's chat template has no place for pictures",
                param="messages",
                hint="start the server with a chat template for pictures (chat_template)",
            )
        return content

    def _parts(self, content: str) -> list[Row]:
        parts: list[Row] = []
        for number, text in enumerate(content.split(self._picture)):
            if number:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        return parts or [{"type": "text", "text": ""}]

    def _takes_parts(self, role: str) -> bool:
        takes = self._takes.get(role)
        if takes is None:
            takes = self._takes[role] = self._probe(role)
        return takes

    def _probe(self, role: str) -> bool:
        """Return True if the template renders the text of a list of parts, and not the list itself."""
        row: Row = {"role": role, "content": [{"type": "text", "text": _PROBE}]}
        rows = [row]
        if role != "user":
            user = {"role": "user", "content": self._parts("x") if self._takes_parts("user") else "x"}
            rows = [row, user] if role == "system" else [user, row]
        try:
            shown = self._render(rows)
        except RequestError:
            return False
        return _PROBE in shown and f"{_PROBE}'" not in shown and f'{_PROBE}"' not in shown
