"""Guided decoding by a JSON schema: before each token, those that cannot continue a valid value are masked out.

The grammar and the masks are llguidance's (https://github.com/guidance-ai/llguidance). A schema with a keyword that it
cannot enforce is refused, never relaxed. White space between two parts of a value is a space, or a line break and an
indent, so that a weak model cannot fill its answer with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gym_fed.errors import ErrorCode, GymError

_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,8}|\n\t{1,3})?",
}
MAX_SCHEMA_CHARACTERS = 200_000


class GuideFactory:
    """Makes guides for one tokenizer; the first one takes a moment.

    Args:
        tokenizer: Of ``transformers``, fast.
        vocab_size: Width of the model's logits.
        end_ids: Tokens that end an answer; allowed where the value is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        import llguidance.hf

        if not end_ids:
            raise _refused(tokenizer, "it has no end token")
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=sorted(end_ids)
            )
        except Exception as error:  # the library raises its own kinds for its own reasons
            raise _refused(tokenizer, str(error).splitlines()[0] if str(error) else repr(error)) from error
        self._vocab_size = vocab_size

    def guide(self, schema: str) -> Guide:
        """A guide for one answer.

        Args:
            schema: JSON Schema as JSON text; ``{}`` allows any object.

        Raises:
            GymError: ``DATA_INVALID`` for a schema that is none, or that cannot be enforced, with the reason.
        """
        from llguidance import LLMatcher

        if len(schema) > MAX_SCHEMA_CHARACTERS:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"a JSON schema of {len(schema):,} characters; {MAX_SCHEMA_CHARACTERS:,} are allowed",
            )
        try:
            value = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GymError(ErrorCode.DATA_INVALID, f"the JSON schema is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise GymError(ErrorCode.DATA_INVALID, f"a JSON schema is an object, not {schema[:40]!r}")
        text = schema if value else '{"type": "object"}'
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
        except ValueError as error:  # nested too deep for the library
            raise _not_enforced(str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _not_enforced(matcher.get_error())
        return Guide(matcher, self._vocab_size)


class Guide:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        first = self._bitmask()
        self._try_a_token(matcher, first)
        self._first: bytes | None = first

    def _try_a_token(self, matcher: Any, first: bytes) -> None:
        """Refuse schemas at submission that prove too complex, or allow nothing, only when they are used."""
        if not matcher.is_error():
            trial = matcher.deep_copy()
            trial.consume_token(int(self._unpacked(first).argmin()))
            if not trial.is_stopped():
                trial.compute_bitmask()
            matcher = trial
        if matcher.is_error():
            raise _not_enforced(matcher.get_error())

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
            raise _not_further(self._matcher.get_error().splitlines()[0])


def banned_by(guides: Mapping[int, Guide]) -> dict[int, Any]:
    """``Guide.banned`` of each, or its ``GymError``, under the same key."""
    found: dict[int, Any] = {}
    for key, guide in guides.items():
        try:
            found[key] = guide.banned()
        except GymError as error:
            found[key] = error
        except Exception as error:  # noqa: BLE001 - the library's own: it fails this answer, not the others'
            found[key] = _not_further(repr(error))
    return found


def _not_enforced(reason: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"the JSON schema cannot be enforced: {(reason.splitlines() or ['no reason given'])[0]}",
        "leave that keyword out, make the schema simpler, or ask for plain text",
    )


def _not_further(reason: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID, f"the JSON schema cannot be enforced further: {reason}", "make it simpler"
    )


def _refused(tokenizer: Any, reason: str) -> GymError:
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"guided output is not possible with the tokenizer {type(tokenizer).__name__} of "
        f"{getattr(tokenizer, 'name_or_path', '') or 'this model'}: {reason}",
        "ask for plain text",
    )
