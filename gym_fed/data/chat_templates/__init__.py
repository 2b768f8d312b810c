"""Chat templates in training: which one writes a conversation, and which part of its text the assistant wrote."""

from gym_fed.data.chat_templates.choice import read_chat_template, use_chat_template
from gym_fed.data.chat_templates.conversation import (
    REASONING_KEYS,
    ChatRenderer,
    Conversation,
    Reasoning,
    write_answered,
)
from gym_fed.data.chat_templates.marks import has_marks, training_template, vision_template

__all__ = [
    "REASONING_KEYS",
    "ChatRenderer",
    "Conversation",
    "Reasoning",
    "has_marks",
    "read_chat_template",
    "training_template",
    "use_chat_template",
    "vision_template",
    "write_answered",
]
