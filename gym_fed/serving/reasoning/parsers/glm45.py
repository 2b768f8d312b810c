"""GLM-4.5 and later: ``<think>`` and ``</think>`` without line breaks, written by the model."""

from __future__ import annotations

from gym_fed.serving.reasoning.base import WrittenThought
from gym_fed.serving.reasoning.parsers._tags import CLOSE, OPEN, TagParser


class Glm45(TagParser):
    """The prompt ends with ``<|assistant|>``; with thinking off, an empty thought follows it."""

    order = 20

    @classmethod
    def matches(cls, written: WrittenThought) -> bool:
        if written.before is None or "<|assistant|>" not in written.prompt:
            return False
        return written.before.endswith(OPEN) and written.after.startswith(CLOSE)
