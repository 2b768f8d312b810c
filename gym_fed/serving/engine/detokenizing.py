"""Incremental detokenization: convert tokens to bytes, and decode the text of a growing answer.

If an answer ends within a character, that character is dropped. Other invalid UTF-8 is replaced with U+FFFD, one for
each sequence that could begin a character, as in Python and browsers.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from gym_fed.core.tokenizer_errors import tokenizer_errors
from gym_fed.serving.plain_tokenizer import PlainTokenizer

_UNKNOWN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A SentencePiece byte-fallback token."""

_LONGEST_CHARACTER = 4
"""Maximum size in bytes of a UTF-8 character."""

START, IN_TEXT, IN_WORD = range(3)
"""Positions of a token: first in the text, after other text, or inside a word if tokens mark the ends of words."""


class TextDecoder:
    """Converts the tokens of one tokenizer to bytes; shared between requests.

    The bytes are those that the tokenizer's decoder outputs, with two exceptions, because that decoder works on
    characters. A token that is part of a character returns its raw bytes. An added token that a byte-level decoder
    would garble (``café``) returns the bytes of its text.

    Args:
        tokenizer: A tokenizer of ``transformers``, or a ``PlainTokenizer``.

    Attributes:
        tokenizer: The tokenizer.
        backend: The tokenizer of the ``tokenizers`` library, which is never changed; None for a slow one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend: Any = None
        if isinstance(tokenizer, PlainTokenizer):
            self.backend = tokenizer.backend_tokenizer
        elif getattr(tokenizer, "backend_tokenizer", None) is not None:
            from tokenizers import Tokenizer

            # A copy, since another thread may encode with the original with padding or truncation.
            self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self.backend.no_padding()
            self.backend.no_truncation()
        if self.backend is None:
            added = tokenizer.added_tokens_decoder
            self._special = frozenset(tokenizer.all_special_ids)
        else:
            added = self.backend.get_added_tokens_decoder()
            self._special = frozenset(number for number, token in added.items() if token.special)
        self._added = {number: str(getattr(token, "content", token)) for number, token in added.items()}
        self._end_of_word = _end_of_word(self.backend)
        self._bytes: dict[tuple[int, int], bytes] = {}
        with tokenizer_errors(tokenizer):
            anchor = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._anchors = {START: [], IN_TEXT: anchor, IN_WORD: self._inside_word(anchor)}
        self._anchor_texts = {place: self._decoded(ids) for place, ids in self._anchors.items()}

    def is_special(self, token_id: int) -> bool:
        """Return True for a control token, which is part of a text only if requested."""
        return token_id in self._special

    def added_text(self, token_id: int) -> str:
        """Return the text of an added token, such as a control token; empty for others."""
        return self._added.get(token_id, "")

    def token(self, token_id: int, place: int = IN_TEXT) -> bytes:
        """Return the bytes of a token; empty for an id that is not in the vocabulary.

        Args:
            token_id: The token.
            place: Its position; some tokenizers write a space before all tokens but the first.

        Raises:
            GymError: ``MODEL_INVALID`` for a token that the library cannot decode.
        """
        data = self._bytes.get((place, token_id))
        if data is None:
            data = self._bytes[place, token_id] = self._bytes_of(token_id, place)
        return data

    def place_after(self, token_id: int) -> int:
        """Return the position of a token that follows this one."""
        inside = self._end_of_word and not (self._piece(token_id) or "").endswith(self._end_of_word)
        return IN_WORD if inside else IN_TEXT

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decode the tokens of a text; ``special`` includes special tokens."""
        place, data = START, bytearray()
        for token_id in token_ids:
            if special or token_id not in self._special:
                data += self.token(token_id, place)
                place = self.place_after(token_id)
        return data.decode(errors="replace")

    def stream(
        self, prompt_ids: Sequence[int], shown: Collection[int] = (), *, special: bool = False
    ) -> TextStream:
        """Open a stream whose text continues the prompt's, as if all tokens were decoded together.

        Args:
            prompt_ids: The prompt.
            shown: Special tokens to include in the answer's text.
            special: Whether to include all special tokens.
        """
        return TextStream(self, prompt_ids, shown, special=special)

    def _bytes_of(self, token_id: int, place: int) -> bytes:
        text = self._decoded([*self._anchors[place], token_id])[len(self._anchor_texts[place]) :]
        piece = self._piece(token_id)
        if piece is None or _UNKNOWN not in text:
            return text.encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        table = byte_level_alphabet()
        return bytes(table[char] for char in piece) if table.keys() >= set(piece) else text.encode()

    def _decoded(self, ids: list[int]) -> str:
        with tokenizer_errors(self.tokenizer):
            if self.backend is not None:
                return str(self.backend.decode(ids, skip_special_tokens=False))
            return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _piece(self, token_id: int) -> str | None:
        """Return the token as written in the vocabulary."""
        of = self.tokenizer.convert_ids_to_tokens if self.backend is None else self.backend.id_to_token
        piece: str | None = of(token_id)
        return piece

    def _inside_word(self, anchor: list[int]) -> list[int]:
        """Return a token that does not end a word, if the tokenizer marks ends of words."""
        if self.backend is None or not self._end_of_word:
            return anchor
        vocabulary = self.backend.get_vocab().items()
        inner = (
            i for piece, i in vocabulary if i not in self._added and not piece.endswith(self._end_of_word)
        )
        return [next(inner, *anchor)]


def _end_of_word(backend: Any) -> str:
    """Return the suffix of tokens that end a word, such as GPT's ``</w>``; empty if there is none."""
    from tokenizers.decoders import BPEDecoder

    decoder = None if backend is None else backend.decoder
    return str(decoder.suffix) if isinstance(decoder, BPEDecoder) else ""


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary (GPT-2's ``bytes_to_unicode``)."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TextStream:
    """Decodes one answer as it grows; an incomplete character is held back.

    An incomplete character at the end of the prompt is completed.

    Attributes:
        position: The number of characters so far.
        span: The start and end of the last token in characters, including one that it begins.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        prompt_ids: Sequence[int],
        shown: Collection[int] = (),
        *,
        special: bool = False,
    ) -> None:
        self._decoder, self._shown, self._all_shown = decoder, frozenset(shown), special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = START
        self.position = 0
        self.span = (0, 0)
        tail = b""
        for token_id in reversed(prompt_ids):
            if self.hides(token_id):
                continue
            if self._place == START:
                self._place = decoder.place_after(token_id)
            tail = decoder.token(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        self._utf8.decode(tail)
        self._continues_prompt = bool(self._utf8.getstate()[0])

    def is_special(self, token_id: int) -> bool:
        """Return True if a token is a control token."""
        return self._decoder.is_special(token_id)

    def hides(self, token_id: int) -> bool:
        """Return True if a token is not part of the text."""
        return self.is_special(token_id) and not (self._all_shown or token_id in self._shown)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add now; for a hidden one, the bytes of its own text."""
        return self._decoder.token(token_id, self._place)

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that is now complete."""
        if self.hides(token_id):
            return ""
        data = self.bytes_of(token_id)
        self._place = self._decoder.place_after(token_id)
        begun, start = self._utf8.getstate()[0], self.position
        if begun and data and not _continues(begun, data[:1]):
            if self._continues_prompt:
                self._utf8.reset()
            else:
                start += 1  # the unfinished bytes became a separate U+FFFD
        self._continues_prompt = self._continues_prompt and not data
        text = self._utf8.decode(data)
        if _is_surrogate(
            self._utf8.getstate()[0]
        ):  # CPython waits for a third byte, which completes no character
            text += self._utf8.decode(b"", final=True)
        self.position += len(text)
        self.span = (start, self.position + bool(self._utf8.getstate()[0]))
        return text

    def skip(self) -> None:
        """End a part of the text, such as the thought, at a token without text, and drop an incomplete character."""
        self._utf8.reset()


def _continues(begun: bytes, byte: bytes) -> bool:
    if _is_surrogate(begun + byte):
        return False
    utf8 = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        utf8.decode(begun + byte)
    except UnicodeDecodeError:
        return False
    return True


def _is_surrogate(begun: bytes) -> bool:
    """Return True for the first two bytes of an encoded surrogate, which is no character."""
    return begun[:1] == b"\xed" and begun[1:2] >= b"\xa0"


class StopTexts:
    """Holds back text that may become a stop text, and truncates the answer before the first one.

    Special tokens that are not part of the answer's text are also compared.

    Attributes:
        matched: True once a stop text was found.
        taken: The number of characters of the answer so far.
        shown: The number of these that may be shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self._hidden: list[bool] = []  # one entry for each held-back character
        self.matched = False
        self.taken = self.shown = 0

    def push(self, text: str, *, hidden: bool = False) -> str:
        """Add text, and return the text that may be shown; if that sets ``matched``, the answer ends with it.

        Args:
            text: The text of a token.
            hidden: True if it is not part of the answer.
        """
        self.taken += 0 if hidden else len(text)
        if not text:
            return ""
        if not self._stops:
            self.shown = self.taken
            return "" if hidden else text
        self._held += text
        self._hidden += [hidden] * len(text)
        starts = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self.matched = True
            released = self._release(min(starts))
            self._held, self._hidden = "", []
            return released
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return self._release(len(self._held) - length)
        return self.finish()

    def finish(self) -> str:
        """Return the held-back text at the end of the answer."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text = "".join(
            char for char, hidden in zip(self._held[:count], self._hidden, strict=False) if not hidden
        )
        self._held, self._hidden = self._held[count:], self._hidden[count:]
        self.shown += len(text)
        return text
