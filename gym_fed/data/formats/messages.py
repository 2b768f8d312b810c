"""OpenAI's messages: role and content, tool calls, and content parts with text or images."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.base import Raw, as_object
from gym_fed.data.formats.sharegpt import conversation_row


def read(raw: Any) -> Raw:
    """The conversation under ``messages``."""
    return conversation_row(as_object(raw), "messages")
