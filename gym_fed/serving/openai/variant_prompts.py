"""The prompts of each variant: those of the base, unless it has added tokens."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gym_fed.serving.openai.prompts import Prompts

if TYPE_CHECKING:
    from gym_fed.serving.engine.vocabularies import Vocabularies, Vocabulary


class VariantPrompts:
    """The prompts of the base and of variants with added tokens. Thread-safe.

    Args:
        base: Those of the base.
        vocabularies: The tokenizers of the variants; None: all have the base's.
        more: Further arguments of ``Prompts``.
    """

    def __init__(self, base: Prompts, vocabularies: Vocabularies | None, *more: Any) -> None:
        self._base, self._vocabularies, self._more = base, vocabularies, more
        self._of: WeakKeyDictionary[Vocabulary, Prompts] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, variant: str | None) -> Prompts:
        """Return the prompts of a variant; raises like ``Vocabularies.of``."""
        vocabulary = None if self._vocabularies is None else self._vocabularies.of(variant)
        if self._vocabularies is None or vocabulary is None or vocabulary is self._vocabularies.base:
            return self._base
        with self._lock:
            prompts = self._of.get(vocabulary)
            if prompts is None:
                prompts = self._of[vocabulary] = Prompts(vocabulary.tokenizer, vocabulary.size, *self._more)
            return prompts

    @property
    def malformed_tool_calls(self) -> int:
        """The number of texts that looked like tool calls but were malformed."""
        with self._lock:
            return sum(prompts.tools.malformed for prompts in (self._base, *self._of.values()))
