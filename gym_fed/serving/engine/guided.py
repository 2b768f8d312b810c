"""Guided decoding: before each token, those that cannot continue what the answer is held to are masked out.

The masks are llguidance's (https://github.com/guidance-ai/llguidance). A schema with a keyword that it cannot enforce
is refused, never relaxed. White space between two parts of a JSON value is a space, or a line break and an indent, so
that a weak model cannot fill its answer with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.grammars import compiled, not_enforced, said_of
from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.plain_tokenizer import PlainTokenizer

MOST_ITEMS = 200
"""Of Earley's parser at one byte, of a grammar in Lark's notation or GBNF: an ambiguous one has ever more, and each
mask takes longer. Schemas are not ambiguous, and an object of many optional names has many: llguidance's own bound."""


class GuideFactory:
    """Makes guides for one tokenizer; the first one takes a moment.

    Args:
        tokenizer: Of ``transformers``, fast, or plain.
        vocab_size: Width of the model's logits.
        end_ids: Tokens that end an answer; allowed where the value is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        if not end_ids:
            raise _refused(tokenizer, "it has no end token")
        try:
            self._tokenizer = _of_llguidance(tokenizer, max(vocab_size, len(tokenizer)), sorted(end_ids))
        except Exception as error:  # the library raises its own kinds for its own reasons
            raise _refused(tokenizer, str(error).splitlines()[0] if str(error) else repr(error)) from error
        self._vocab_size = vocab_size

    def guide(self, grammar: Grammar) -> Guide:
        """A guide for one answer.

        Raises:
            GymError: As ``compiled``, with the reason.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=MOST_ITEMS if grammar.kind == "grammar" else None)
        matcher = LLMatcher(self._tokenizer, compiled(grammar), log_level=0, limits=limits)
        words = said_of(grammar)
        if matcher.is_error():
            raise not_enforced(words, matcher.get_error())
        return Guide(matcher, self._vocab_size, words)


class Guide:
    """The state of one answer in its grammar.

    Args:
        matcher: Of llguidance.
        vocab_size: Width of the logits.
        words: What errors call the grammar.
    """

    def __init__(self, matcher: Any, vocab_size: int, words: str) -> None:
        self._matcher, self._words = matcher, words
        self._vocab_size = vocab_size
        first = self._bitmask()
        self._try_a_token(matcher, first)
        self._first: bytes | None = first

    def _try_a_token(self, matcher: Any, first: bytes) -> None:
        """Refuse grammars at submission that prove too complex, or allow nothing, only when they are used."""
        if not matcher.is_error():
            trial = matcher.deep_copy()
            trial.consume_token(int(self._unpacked(first).argmin()))
            if not trial.is_stopped():
                trial.compute_bitmask()
            matcher = trial
        if matcher.is_error():
            raise not_enforced(self._words, matcher.get_error())

    def banned(self) -> Any:
        """Tokens that may not come next: ``[vocab] bool`` of numpy.

        Raises:
            GymError: ``DATA_INVALID`` when the grammar has become too complex.
        """
        bits, self._first = self._first or self._bitmask(), None
        self._check()
        return self._unpacked(bits)

    def _unpacked(self, bits: bytes) -> Any:
        import numpy as np

        ones = np.frombuffer(bits, dtype=np.uint8)
        return np.unpackbits(~ones, count=self._vocab_size, bitorder="little").view(bool)

    def _bitmask(self) -> bytes:
        found: bytes = self._matcher.compute_bitmask()
        return found

    def push(self, token_id: int) -> None:
        """Advance by the chosen token.

        Raises:
            GymError: ``DATA_INVALID`` when the grammar has become too complex.
        """
        self._first = None
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def complete(self) -> bool:
        """Whether the value is complete and nothing may follow it."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _not_further(self._words, self._matcher.get_error().splitlines()[0])


def banned_by(guides: Mapping[int, Guide]) -> dict[int, Any]:
    """``Guide.banned`` of each, or its ``GymError``, under the same key."""
    found: dict[int, Any] = {}
    for key, guide in guides.items():
        try:
            found[key] = guide.banned()
        except GymError as error:
            found[key] = error
        except Exception as error:  # noqa: BLE001 - the library's own: it fails this answer, not the others'
            found[key] = _not_further("what the answer is held to", repr(error))
    return found


def _of_llguidance(tokenizer: Any, n_vocab: int, end_ids: list[int]) -> Any:
    if isinstance(tokenizer, PlainTokenizer):
        from llguidance import LLTokenizer

        return LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=n_vocab, eos_token=end_ids)
    from llguidance.hf import from_tokenizer  # imports transformers

    return from_tokenizer(tokenizer, n_vocab=n_vocab, eos_token=end_ids)


def _not_further(words: str, reason: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID, f"{words} cannot be enforced further: {reason}", "make it simpler"
    )


def _refused(tokenizer: Any, reason: str) -> GymError:
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"guided output is not possible with the tokenizer {type(tokenizer).__name__} of "
        f"{getattr(tokenizer, 'name_or_path', '') or 'this model'}: {reason}",
        "ask for plain text",
    )
