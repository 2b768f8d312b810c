"""gpt-oss: OpenAI's harmony format, with the channels ``analysis``, ``commentary`` and ``final``.

See https://cookbook.openai.com/articles/openai-harmony. An answer is a sequence of messages::

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from typing import Any

from gym_fed.serving.reasoning.base import (
    AnswerSplit,
    ReasoningParser,
    Splitter,
    WrittenThought,
    encoded,
    joined,
    start_of,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CALL_MARK = f"{CHANNEL}commentary to=functions."
"""The beginning of a call in the splitter's output, whichever of the two places contains the recipient."""

_QUOTED_MARK = CALL_MARK.replace("|", "\u200b|", 1)
"""Replacement for ``CALL_MARK`` in the text of an answer, such as a quotation; a zero-width space marks it as no
call."""

_RECIPIENT = re.compile(r"to=([\w.-]{1,80})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_ROLE = re.compile(r"\s*assistant")
_MAX_HEADER = 256
"""Maximum number of characters of a message's header; in a longer one, the text after the channel is the body."""


class OpenAIGptOss(ReasoningParser):
    """``analysis`` is the thought; ``final``, and ``commentary`` without a recipient, are the answer."""

    order = 10
    marks = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def __init__(self, tokenizer: Any, written: WrittenThought) -> None:
        super().__init__(tokenizer, written)
        self.opening = encoded(tokenizer, f"{CHANNEL}analysis{MESSAGE}")
        self.closing = encoded(tokenizer, f"{END}{START}assistant{CHANNEL}final{MESSAGE}")

    @classmethod
    def matches(cls, written: WrittenThought) -> bool:
        return written.before is not None and written.before.endswith(f"{CHANNEL}analysis{MESSAGE}")

    def splitter(self, tail: str) -> Splitter | None:
        return HarmonySplitter(self.ids, self.texts)


class HarmonySplitter(Splitter):
    """Splits an answer that begins in the header of its first message."""

    def __init__(self, ids: dict[int, str], texts: tuple[str, ...]) -> None:
        super().__init__(ids, texts)
        self._header: str | None = ""
        self._after_start = False
        self._calling = False
        self._thoughts = 0
        self._unfinished = False
        self._held_mark = ""  # text of the answer that may be the beginning of ``CALL_MARK``

    @property
    def unfinished(self) -> bool:
        return self._unfinished

    @property
    def held(self) -> int:
        return super().held + len(self._held_mark)

    def _expects(self, mark: str) -> bool:
        return True

    def _mark(self, mark: str) -> AnswerSplit:
        if mark == MESSAGE and self._header is not None:
            return self._begin(self._header)
        if mark in (CHANNEL, CONSTRAIN) and self._header is not None:
            self._header += mark if mark == CHANNEL else " "
            return AnswerSplit()
        text = CALL if self._calling and mark in (END, CALL) else self._held_mark
        self._held_mark = ""
        self._header, self._calling, self._after_start = "", False, mark == START
        self.thinking = self.answering = False
        return AnswerSplit(text=text)

    def _begin(self, header: str) -> AnswerSplit:
        """Begin the body of a message."""
        self._header = None
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith("functions."):
            self._calling, self._unfinished = True, False
            return AnswerSplit(text=f"{CHANNEL}commentary to={recipient[1]}{MESSAGE}")
        # code for a built-in tool, such as python, is part of the thought
        self.thinking = recipient is not None or (channel is not None and channel[1] == "analysis")
        self.answering = not self.thinking
        self._unfinished = self.thinking
        self._thoughts += self.thinking
        return AnswerSplit(reasoning="\n" if self.thinking and self._thoughts > 1 else "")

    def _plain(self, text: str) -> AnswerSplit:
        if self._header is not None:
            self._header += text
            return self._body_without_mark() if len(self._header) > _MAX_HEADER else AnswerSplit()
        if self.thinking:
            return AnswerSplit(reasoning=text)
        if self._calling:
            return AnswerSplit(text=text)
        text = (self._held_mark + text).replace(CALL_MARK, _QUOTED_MARK)
        certain = len(text) - start_of(CALL_MARK, text)
        self._held_mark = text[certain:]
        return AnswerSplit(text=text[:certain])

    def _body_without_mark(self) -> AnswerSplit:
        """Begin the body after the channel's name, since such a long header must lack its ``<|message|>``."""
        header = self._header or ""
        named = _CHANNEL.search(header) or (_ROLE.match(header) if self._after_start else None)
        end = named.end() if named else 0
        return joined([self._begin(header[:end]), self._plain(header[end:])])

    def _rest(self) -> AnswerSplit:
        """Return text without a header as the answer; a truncated header has no text."""
        header, self._header = self._header or "", None
        parts = [AnswerSplit()]
        if header and not self._after_start and CHANNEL not in header:
            parts = [self._begin(""), self._plain(header)]
        held, self._held_mark = self._held_mark, ""
        return joined([*parts, AnswerSplit(text=held)])
