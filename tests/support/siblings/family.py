"""What a sibling is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.siblings.words import Words

Ids = dict[str, int]
"""Token ids by token, and ``vocab_size``: the tokenizer's words and some without a token, as published."""


@dataclass(frozen=True)
class Sibling:
    """A public model's tiny sibling.

    Attributes:
        hub: The model's name on the Hub.
        words: Its tokenizer.
        template: Its chat template.
        config: ``config.json`` under the published keys, from the tokens' ids.
        ends: Tokens that end an answer, as ``generation_config.json`` lists them.
        pictures: ``preprocessor_config.json`` of a model that reads images.
        processor: ``processor_config.json`` of such a model, where it has one.
        dtype: Type of the published weights.
    """

    hub: str
    words: Words
    template: str
    config: Callable[[Ids], dict[str, Any]]
    ends: tuple[str, ...]
    pictures: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"

    def generation(self, ids: Ids) -> dict[str, Any]:
        """End tokens, padding and beginning."""
        ends = [ids[token] for token in self.ends]
        pad = self.words.pad and {"pad_token_id": ids[self.words.pad]}
        bos = self.words.bos and {"bos_token_id": ids[self.words.bos]}
        return {"eos_token_id": ends if len(ends) > 1 else ends[0], **(pad or {}), **(bos or {})}
