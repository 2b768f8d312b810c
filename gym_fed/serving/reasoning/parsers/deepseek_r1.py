"""DeepSeek R1 and its distilled models, QwQ: the prompt opens the thought, and the answer only closes it."""

from __future__ import annotations

from gym_fed.serving.reasoning.base import WrittenThought
from gym_fed.serving.reasoning.parsers._tags import OPEN, TagParser


class DeepSeekR1(TagParser):
    """With a template that never opens the thought, every answer is assumed to begin inside one.

    If the template opens it, a prompt without ``<think>``, such as after a tool's result, leaves the choice to the
    model.
    """

    order = 40
    assumes_open = True

    @classmethod
    def matches(cls, written: WrittenThought) -> bool:
        return written.before is None and written.prompt.rstrip().endswith(OPEN)
