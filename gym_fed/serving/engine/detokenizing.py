"""Streaming detokenization that never emits half a character, a special token or part of a stop text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from gym_fed.core.tokenizer_errors import tokenizer_errors
from gym_fed.serving.plain_tokenizer import PlainTokenizer

_UNKNOWN = "�"
_LONGEST_CHARACTER = 4
"""Maximum bytes of a UTF-8 character. A byte that three further tokens do not complete is not a character."""

_WINDOW = 16
_KEPT = 4


class TextDecoder:
    """Decodes token ids of one tokenizer; shared between requests.

    Args:
        tokenizer: A tokenizer of ``transformers``, or a ``PlainTokenizer``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = None
        if isinstance(tokenizer, PlainTokenizer):
            self._backend = tokenizer.backend_tokenizer
        elif getattr(tokenizer, "backend_tokenizer", None) is not None:
            from tokenizers import Tokenizer

            # A copy: encoding with other settings in another thread borrows the original.
            self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._texts: dict[int, str] = {}
        with tokenizer_errors(tokenizer):
            anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor = anchor[-1:]
        self._anchor_text = self.text(self._anchor, special=True)

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode the ids without cleaning up spaces; ``special``: include special tokens.

        Raises:
            GymError: ``MODEL_INVALID`` for a text that the library cannot decode.
        """
        with tokenizer_errors(self._tokenizer):
            if self._backend is not None:
                return str(self._backend.decode(list(ids), skip_special_tokens=not special))
            return str(
                self._tokenizer.decode(
                    list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
                )
            )

    def token(self, token_id: int) -> str:
        """Decode one token as in the middle of a line (some tokenizers drop a first space), special tokens included."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.text([*self._anchor, token_id], special=True)[len(self._anchor_text) :]
            self._texts[token_id] = text
        return text

    def stream(self, prompt_ids: Sequence[int], shown: Collection[int] = ()) -> TextStream:
        """Open a stream whose text continues the prompt's, as if all tokens were decoded together.

        Args:
            prompt_ids: The prompt.
            shown: Special tokens to include in the answer's text.
        """
        return TextStream(self, prompt_ids, shown)


class TextStream:
    """Decodes one answer as it grows: each new token is decoded with a window of the last ones."""

    def __init__(
        self, decoder: TextDecoder, prompt_ids: Sequence[int], special: Collection[int] = ()
    ) -> None:
        self._decoder = decoder
        self._special = frozenset(special)
        for overlap in range(_KEPT, _WINDOW):
            self._window = list(prompt_ids[-overlap:])
            shown = decoder.text(self._window)
            # It does not begin inside a character
            if not shown.startswith(_UNKNOWN) or overlap >= len(prompt_ids):
                break
        self._shown = shown.rstrip(_UNKNOWN)
        self._unsettled = 0  # last tokens of the window that may be half a character

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that is now certain."""
        if token_id in self._special:
            return self.skip(token_id) + self._decoder.token(token_id)
        self._window.append(token_id)
        text = self._decoder.text(self._window)
        if not text.endswith(_UNKNOWN):
            new = text[len(self._shown) :]
            self._unsettled = 0
            self._accept(text)
            return new
        self._unsettled += 1
        if self._unsettled < _LONGEST_CHARACTER:
            return ""
        self._unsettled = _LONGEST_CHARACTER - 1
        settled = self._decoder.text(self._window[: -self._unsettled])
        new = settled[len(self._shown) :]
        self._shown = settled
        if len(self._window) > 2 * _WINDOW:  # nothing but bytes that are not characters
            self._window = self._window[-_LONGEST_CHARACTER:]
            self._shown = self._decoder.text(self._window[: -self._unsettled])
        return new

    def finish(self) -> str:
        """Return the held-back text; half a character at the very end is dropped."""
        return (
            self._decoder.text(self._window).rstrip(_UNKNOWN)[len(self._shown) :] if self._unsettled else ""
        )

    def skip(self, token_id: int) -> str:
        """Add a token without its text, and return the held-back text; half a character before it is dropped."""
        before = self.finish()
        self._unsettled = 0
        self._window.append(token_id)
        self._accept(self._decoder.text(self._window))
        return before

    def _accept(self, text: str) -> None:
        self._shown = text
        if len(self._window) > _WINDOW:
            overlap = self._window[-_KEPT:]
            shown = self._decoder.text(overlap)
            if not shown.startswith(_UNKNOWN):
                self._window, self._shown = overlap, shown


class StopTexts:
    """Holds back text that may become a stop text, and cuts the answer before the first one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text, and return the text that may be shown; if that sets ``matched``, the answer ends with it."""
        if not self._stops:
            return text
        if not text:
            return ""
        held = self._held + text
        starts = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self.matched = True
            self._held = ""
            return held[: min(starts)]
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            tail = held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                self._held = tail
                return held[:-length]
        self._held = ""
        return held

    def finish(self) -> str:
        """Return the held-back text, since no further text follows."""
        held, self._held = self._held, ""
        return held
