"""Convert message contents to the form that the chat template of a model of media takes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from gym_fed.data.chat_templates.parts import takes_parts
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import Part, text_of
from gym_fed.serving.pictures.processor import NOUNS

Row = dict[str, Any]


class ContentParts:
    """Converts message contents to the form that a vision model's chat template takes: lists of parts.

    Until tools have been added to the messages, each message's content is one string, with a random placeholder for
    each medium that no client can guess. Rendering a list shows which roles take lists.

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
        for number, text in enumerate(self._split.split(content)):  # texts and kinds by turns
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
