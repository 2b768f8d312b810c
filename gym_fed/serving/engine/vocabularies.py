"""The tokenizers of a base and of its variants with added tokens, with their decoders and grammar compilers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gym_fed.delta.added_tokens import require_servable_tokens
from gym_fed.serving.engine.detokenizing import TextDecoder

if TYPE_CHECKING:
    from gym_fed.serving.engine.guided import GuideFactory
    from gym_fed.serving.forward.variant_weights import VariantSource, VariantTokens

_MAX_KEPT = 16
"""Maximum number of variant vocabularies in memory; each has two copies of the tokenizer, and tables for grammars."""


class Vocabulary:
    """A tokenizer with its decoder and its grammar compiler.

    Args:
        tokenizer: The tokenizer, which is not modified.
        size: The number of token ids that the model has.
        end_ids: Tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, size: int, end_ids: frozenset[int]) -> None:
        self.tokenizer, self.size, self.end_ids = tokenizer, size, end_ids
        self._guides: GuideFactory | None = None
        self._lock = threading.Lock()

    @cached_property
    def decoder(self) -> TextDecoder:
        """The decoder, which knows the bytes of each token."""
        return TextDecoder(self.tokenizer)

    def guides(self) -> GuideFactory:
        """Return its grammar compiler, which is slow to create."""
        with self._lock:
            if self._guides is None:
                from gym_fed.serving.engine.guided import GuideFactory

                self._guides = GuideFactory(self.decoder, self.size, self.end_ids)
            return self._guides


@dataclass
class _Extension:
    lock: threading.Lock = field(default_factory=threading.Lock)
    vocabulary: Vocabulary | None = None


class Vocabularies:
    """The vocabularies of one server. Thread-safe.

    Args:
        base: The vocabulary of the base.
        source: The source of variants; None without variants.
    """

    def __init__(self, base: Vocabulary, source: VariantSource | None) -> None:
        self.base, self._source = base, source
        self._of_files: OrderedDict[str, _Extension] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, variant: str | None) -> Vocabulary:
        """Return the vocabulary of a variant; the base's if it has no added tokens.

        Raises:
            GymError: ``BASE_MISMATCH`` for tokens that cannot be added to the base's tokenizer; ``MODEL_INVALID`` for
                too much text in them; errors from ``VariantSource.added_tokens``.
        """
        if variant is None or self._source is None:
            return self.base
        added = self._source.added_tokens(variant)
        if added is None:
            return self.base
        with self._lock:
            extension = self._of_files.setdefault(added.delta_sha256, _Extension())
            self._of_files.move_to_end(added.delta_sha256)
            if len(self._of_files) > _MAX_KEPT:
                self._of_files.popitem(last=False)
        with extension.lock:  # one lock per file, so that other variants do not wait
            if extension.vocabulary is None:
                extension.vocabulary = self._extended(variant, added)
            return extension.vocabulary

    def _extended(self, name: str, added: VariantTokens) -> Vocabulary:
        from gym_fed.delta.vocabulary import extended_by

        require_servable_tokens(added.tokens, f"variant {name!r}")
        tokenizer = extended_by(self.base.tokenizer, added.tokens, f"variant {name!r}")
        ends = self.base.end_ids
        if "eos_token" in added.tokens.roles:  # as in the config of the merged model
            ends = frozenset({tokenizer.eos_token_id})
        return Vocabulary(tokenizer, added.size or self.base.size, ends)
