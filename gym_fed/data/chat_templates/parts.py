"""Detect the form in which a chat template takes a message's content: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Render = Callable[[list[dict[str, Any]]], str | None]
"""A function that renders messages to a text, or to None if the template refuses them."""

_PROBE = "a probe of parts"


def takes_parts(render: Render, role: str) -> bool:
    """Return True if the template renders the text of a list of parts, and not the list itself.

    Args:
        render: Renders messages with the template.
        role: The role of the message with the list.
    """
    row = {"role": role, "content": [{"type": "text", "text": _PROBE}]}
    rows = [row]
    if role != "user":
        content: Any = [{"type": "text", "text": "x"}] if takes_parts(render, "user") else "x"
        user = {"role": "user", "content": content}
        rows = [row, user] if role == "system" else [user, row]
    shown = render(rows)
    if shown is None:
        return False
    return _PROBE in shown and f"{_PROBE}'" not in shown and f'{_PROBE}"' not in shown
