"""Messages' contents as a vision model's chat template takes them: lists of parts, among which pictures have places.

Before, while tools are brought into the messages, a content is one text in which a nonce stands for each picture:
nobody outside can write it. Which roles take lists is found out by what the template makes of one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import ImagePart, TextPart, text_of

Row = dict[str, Any]

_PROBE = "a probe of parts"


class ContentParts:
    """Of one chat template.

    Args:
        render: Messages to a text, as they are; raises ``RequestError``.
    """

    def __init__(self, render: Callable[[list[Row]], str]) -> None:
        self._render = render
        self._picture = f"<{secrets.token_hex(16)}>"
        self._takes: dict[str, bool] = {}

    def marked(self, content: str | Sequence[TextPart | ImagePart] | None) -> str:
        """A content as one text."""
        return text_of(content, self._picture)

    def shaped(self, rows: list[Row]) -> list[Row]:
        """Rows with such texts, for the template.

        Raises:
            RequestError: For a picture in a message whose content must be a text.
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
        found: list[Row] = []
        for number, text in enumerate(content.split(self._picture)):
            if number:
                found.append({"type": "image"})
            if text:
                found.append({"type": "text", "text": text})
        return found or [{"type": "text", "text": ""}]

    def _takes_parts(self, role: str) -> bool:
        found = self._takes.get(role)
        if found is None:
            found = self._takes[role] = self._probe(role)
        return found

    def _probe(self, role: str) -> bool:
        """Whether a list's text is written, and nothing else of the list."""
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
