"""Guided decoding: before each token, mask out the tokens that cannot continue the answer's grammar.

The masks are llguidance's (https://github.com/guidance-ai/llguidance). A schema with a keyword that it cannot enforce
is refused, never relaxed. White space between the parts of a JSON value is limited to a space, or a line break with an
indent, so that a weak model cannot fill its answer with white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import is_panic
from gym_fed.core.text import counted, plain
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.engine.schema_references import reference_cycle

_SENTINEL = "\x02"
"""A character that forms no token with other characters."""
MAX_ITEMS = 200
"""Maximum number of items of the Earley parser at one byte, for a grammar in Lark's notation or GBNF. With an ambiguous
grammar, the number grows and each mask takes longer. Schemas are not ambiguous but may have many optional names, so
llguidance's own limit applies to them."""


class GuideFactory:
    """Compiles grammars for one tokenizer; the first one takes longer.

    Args:
        decoder: The decoder, which has the tokens' bytes.
        vocab_size: Width of the model's logits.
        end_ids: Tokens that end an answer; allowed after a complete value.

    Raises:
        GymError: ``MODEL_INVALID`` for a tokenizer with which no answer can be guided.
    """

    def __init__(self, decoder: TextDecoder, vocab_size: int, end_ids: frozenset[int]) -> None:
        tokenizer = decoder.tokenizer
        if not end_ids:
            raise _refused(tokenizer, "it has no end token")
        if decoder.backend is None:
            raise _refused(tokenizer, "only fast tokenizers are supported")
        try:
            tokens = _GuidedVocabulary(decoder, max(vocab_size, len(tokenizer)), min(end_ids))
            self._tokenizer = _read(tokens, sorted(end_ids))
        except Exception as error:  # llguidance raises its own exceptions
            raise _refused(tokenizer, str(error).splitlines()[0] if str(error) else repr(error)) from error
        self._vocab_size = vocab_size

    def guide(self, grammar: Grammar) -> Guide:
        """Compile the guide of one answer.

        Raises:
            GymError: See ``compiled``.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=MAX_ITEMS if grammar.kind == "grammar" else None)
        matcher = LLMatcher(self._tokenizer, compiled(grammar), log_level=0, limits=limits)
        words = _WORDS[grammar.kind][0]
        if matcher.is_error():
            raise not_enforced(words, matcher.get_error())
        return Guide(matcher, self._vocab_size, words)


class Guide:
    """The state of one answer in its grammar.

    Args:
        matcher: llguidance's matcher.
        vocab_size: Width of the logits.
        words: Name of the grammar for error messages.
    """

    def __init__(self, matcher: Any, vocab_size: int, words: str) -> None:
        self._matcher, self._words = matcher, words
        self._vocab_size = vocab_size
        first = self._bitmask()
        self._require_first_token(matcher, first)
        self._first: bytes | None = first

    def _require_first_token(self, matcher: Any, first: bytes) -> None:
        """Refuse a grammar that is too complex or allows no token; compilation does not detect this."""
        if not matcher.is_error():
            trial = matcher.deep_copy()
            trial.consume_token(int(self._unpacked(first).argmin()))
            if not trial.is_stopped():
                trial.compute_bitmask()
            matcher = trial
        if matcher.is_error():
            raise not_enforced(self._words, matcher.get_error())

    def banned(self) -> Any:
        """Return the tokens that may not come next, a numpy array ``[vocab] bool``.

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
        bitmask: bytes = self._matcher.compute_bitmask()
        return bitmask

    def push(self, token_id: int) -> None:
        """Advance by the sampled token.

        Raises:
            GymError: ``DATA_INVALID`` when the grammar has become too complex.
        """
        self._first = None
        self._matcher.consume_token(token_id)
        self._check()

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""
        self._first = None
        self._matcher.rollback(count)
        self._check()

    @property
    def complete(self) -> bool:
        """True if the value is complete and nothing may follow it."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _cannot_continue(self._words, self._matcher.get_error().splitlines()[0])


class TokenMask(Protocol):
    """The interface of objects that determine which tokens may come next."""

    def banned(self) -> Any:
        """Return the tokens that may not come next; see ``Guide``."""


def banned_by(guides: Mapping[int, TokenMask]) -> dict[int, Any]:
    """Return each guide's ``banned`` tokens, or the ``GymError`` that it raised, under the same key."""
    masks: dict[int, Any] = {}
    for key, guide in guides.items():
        try:
            masks[key] = guide.banned()
        except GymError as error:
            masks[key] = error
        except Exception as error:  # noqa: BLE001 - the library's own; only this answer fails
            masks[key] = _cannot_continue("the grammar of the answer", repr(error))
    return masks


class _GuidedVocabulary:
    """A vocabulary in the form that llguidance's ``TokenizerWrapper`` takes.

    llguidance's own reader of tokenizer.json takes quadratic time in the number of added tokens, and returns different
    bytes than ``TextDecoder`` for some of them. As in that reader, tokens written ``<...>`` and ids without a token
    count as control tokens.
    """

    bos_token_id = None

    def __init__(self, decoder: TextDecoder, size: int, end_id: int) -> None:
        self.eos_token_id = end_id
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token_id in range(size):
            data, added = decoder.token(token_id), decoder.added_text(token_id)
            if not data or decoder.is_special(token_id) or (added.startswith("<") and added.endswith(">")):
                data = added.encode() or b"<[%d]>" % token_id  # the name in a grammar
                self.special_token_ids.append(token_id)
            self.tokens.append(data)
        special = set(self.special_token_ids)
        self._ids = {data: token_id for token_id, data in enumerate(self.tokens) if token_id not in special}
        self._longest = max(map(len, self._ids), default=0)
        self._backend = decoder.backend
        self._sentinel = self._encode(_SENTINEL)

    def __call__(self, text: str) -> list[int]:
        """Encode a text that the grammar forces after other text.

        If the tokenizer changes the bytes, by a leading space or normalisation, the longest tokens with the right bytes
        are used instead.
        """
        after = len(self._sentinel)
        ids, data = self._encode(_SENTINEL + text)[after:], text.encode()
        if b"".join(self.tokens[token_id] for token_id in ids) == data:
            return ids
        ids = []
        while data:
            ends = range(min(self._longest, len(data)), 0, -1)
            if (end := next((end for end in ends if data[:end] in self._ids), 0)) == 0:
                break  # the masks constrain the rest
            ids.append(self._ids[data[:end]])
            data = data[end:]
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def _read(tokens: _GuidedVocabulary, end_ids: list[int]) -> Any:
    """Return llguidance's form of a vocabulary.

    Raises:
        ValueError: If llguidance panics, as it does for a token that is longer than the maximum depth of its trie.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    try:
        return LLTokenizer(TokenizerWrapper(tokens), eos_token=end_ids)
    except BaseException as error:
        if not is_panic(error):
            raise
        longest = counted(max(map(len, tokens.tokens)), "byte")
        raise ValueError(f"llguidance cannot read its tokens (the longest has {longest}): {error}") from error


def _cannot_continue(words: str, reason: str) -> GymError:
    return GymError(ErrorCode.DATA_INVALID, f"{words} can no longer be enforced: {reason}", "simplify it")


def _refused(tokenizer: Any, reason: str) -> GymError:
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"guided output is not possible with the tokenizer {type(tokenizer).__name__} of "
        f"{getattr(tokenizer, 'name_or_path', '') or 'this model'}: {reason}",
        "request plain text",
    )


_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,8}|\n\t{1,3})?",
}
MAX_SCHEMA_CHARACTERS = 200_000
MAX_PATTERN_CHARACTERS = 4096
MAX_GRAMMAR_CHARACTERS = 20_000
MAX_CHOICES = 4096
_MAX_REASON = 500

_WORDS = {
    "json_schema": ("the JSON schema", MAX_SCHEMA_CHARACTERS),
    "regex": ("the regular expression", MAX_PATTERN_CHARACTERS),
    "choice": ("the list of choices", MAX_SCHEMA_CHARACTERS),
    "grammar": ("the grammar", MAX_GRAMMAR_CHARACTERS),
    "calls": ("the tools' schemas", MAX_SCHEMA_CHARACTERS * 2),
}


def compiled(grammar: Grammar) -> str:
    """Translate a grammar to the form that llguidance's matcher expects.

    Raises:
        GymError: ``DATA_INVALID`` for a grammar that cannot be enforced, ``TOO_LARGE`` for one that is too long.
    """
    words, most = _WORDS[grammar.kind]
    if len(grammar.text) > most:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"{words} has {counted(len(grammar.text), 'character')}; at most {most:,} are allowed",
        )
    try:
        return _MAKERS[grammar.kind](grammar.text)
    except (ValueError, RecursionError) as error:  # RecursionError if it is nested too deeply for llguidance
        raise not_enforced(words, str(error)) from error


def not_enforced(words: str, reason: str) -> GymError:
    """Return the error for a grammar that llguidance refuses, with the line of its message that describes the fault."""
    lines = reason.splitlines() or ["no reason given"]
    fault = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    fault = fault.partition(" Enable '")[0]  # options of llguidance, which a request cannot set
    remedy = next((remedy for part, remedy in _REMEDIES.items() if part in fault), _REMEDY)
    return GymError(ErrorCode.DATA_INVALID, f"{words} cannot be enforced: {fault[:_MAX_REASON]}", remedy)


_REMEDY = "remove or simplify the named part, or request plain text"
_REMEDIES = {
    "oneOf": "write anyOf instead of oneOf: only one alternative is generated anyway",
    "is not present in a registry": "copy the definition into $defs, and refer to it as #/$defs/NAME",
    "Pointer '": "add the definition that the $ref points to, or correct the $ref",
    "leads back to itself": "remove the $ref, or put a property or an item between it and its target",
}
"""Remedies by a substring of the messages of llguidance or this module."""


def _of_schema(text: str) -> str:
    from llguidance import LLMatcher

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.DATA_INVALID, f"the JSON schema is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise GymError(ErrorCode.DATA_INVALID, f"a JSON schema must be an object, not {text[:40]!r}")
    if reference := reference_cycle(value):
        raise ValueError(f"$ref {plain(reference, 80)!r} leads back to itself")
    compiled_grammar: str = LLMatcher.grammar_from_json_schema(
        text if value else '{"type": "object"}', overrides=_OPTIONS
    )
    return compiled_grammar


def _of_pattern(text: str) -> str:
    from llguidance import LLMatcher

    compiled_grammar: str = LLMatcher.grammar_from_regex(text)
    return compiled_grammar


def _of_choices(text: str) -> str:
    """Translate a JSON list of texts to one terminal, since the number of rules is limited."""
    from llguidance import LLMatcher

    texts = " | ".join(map(json.dumps, json.loads(text)))
    compiled_grammar: str = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
    return compiled_grammar


def _of_notation(text: str) -> str:
    """Translate Lark's notation, or GBNF (llama.cpp's EBNF), whose first rule is ``root``."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(text) is None:
        try:
            text = gbnf_to_lark(_GBNF_PIECE.sub(_renamed_start, text))
        except Exception as error:  # the converter raises its own exceptions
            raise ValueError(str(error) or repr(error)) from error
    compiled_grammar: str = LLMatcher.grammar_from_lark(text)
    return compiled_grammar


_LARK = re.compile(
    r"^[ \t]*(?:%llguidance\b|[?!]{0,2}start(?:\.-?\d+)?(?:\{[^}\n]*\})?(?:\[[^\]\n]*\])?[ \t]*:(?!:=))",
    re.MULTILINE,
)
"""A line of Lark's notation: a rule ``start``, possibly with priority or options, or llguidance's own first line."""
_GBNF_PIECE = re.compile(
    r"""(?P<text>"(?:\\.?|[^"\\])*(?:"|\Z)|\[(?:\\.?|[^\]\\])*(?:\]|\Z)|\#[^\n]*)|(?<![\w-])start(?![\w-])""",
    re.DOTALL,
)


def _renamed_start(piece: re.Match[str]) -> str:
    """Rename GBNF rules called ``start``, the name of the first rule in Lark's notation."""
    return piece[0] if piece["text"] else "start-of-gbnf"


def _of_calls(text: str) -> str:
    """Translate ``{"lark": ..., "schemas": {name: schema}}``; see ``ToolTemplate.grammar``."""
    value = json.loads(text)
    grammars: list[dict[str, Any]] = [{"name": "calls", "lark_grammar": value["lark"]}]
    for name, schema in value["schemas"].items():
        compiled = json.loads(_of_schema(json.dumps(schema)))["grammars"][0]
        grammars.append({"name": name, "json_schema": compiled["json_schema"]})
    return json.dumps({"grammars": grammars})


_MAKERS = {
    "json_schema": _of_schema,
    "regex": _of_pattern,
    "choice": _of_choices,
    "grammar": _of_notation,
    "calls": _of_calls,
}
