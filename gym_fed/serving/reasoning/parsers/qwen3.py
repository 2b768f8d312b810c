"""Qwen3, Qwen3.5, QwQ-like fine-tunes, Nemotron 3, LFM2.5: ``<think>``, written by the model or by the prompt."""

from __future__ import annotations

from gym_fed.serving.reasoning.base import WrittenThought
from gym_fed.serving.reasoning.parsers._tags import CLOSE, OPEN, TagParser


class Qwen3(TagParser):
    """An answer without ``<think>``, after a prompt without it, has no thought."""

    order = 30

    @classmethod
    def matches(cls, written: WrittenThought) -> bool:
        if written.before is None:
            return CLOSE in written.source and not written.prompt.rstrip().endswith(OPEN)
        return written.before.rstrip().endswith(OPEN) and written.after.lstrip().startswith(CLOSE)
