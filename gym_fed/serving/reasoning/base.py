"""The base classes of reasoning parsers, and of the splitters that separate a growing answer from its thought."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from gym_fed.serving.engine.detokenizing import TextStream

TAIL_TOKENS = 32
"""Number of tokens at the end of a prompt that suffice to see whether the template has opened or closed a thought."""


class AnswerSplit(NamedTuple):
    """The next parts of a thought, and of the answer after it."""

    reasoning: str = ""
    text: str = ""


class WrittenThought(NamedTuple):
    """The text that a chat template writes around a thought.

    Attributes:
        prompt: The text after a user's message, up to the beginning of the answer.
        before: The text from there to the thought of an answer; None if the template does not show thoughts.
        after: The text between a thought and the answer.
        source: The template itself.
    """

    prompt: str
    before: str | None = None
    after: str = ""
    source: str = ""


class Splitter(ABC):
    """Splits one answer. Marks are recognised by token id if the tokenizer has them, otherwise by their text.

    Text that may be the beginning of a mark is held back.

    Args:
        ids: The marks that are single tokens, by id.
        texts: The other marks.

    Attributes:
        thinking: True inside a thought.
        answering: True once the answer has begun, which a grammar may constrain.
        waiting: True before the first token that shows whether the answer begins with a thought.
        dropped: True if the last token is a line break that belongs to neither part.
    """

    thinking = False
    answering = False
    waiting = False
    dropped = False

    def __init__(self, ids: dict[int, str], texts: Sequence[str]) -> None:
        self._ids, self._texts = ids, tuple(texts)
        self._held = ""

    def push(self, token_id: int, stream: TextStream) -> AnswerSplit:
        """Add a token of the answer, decoding it with the answer's ``stream``."""
        self.dropped = False
        mark = self._ids.get(token_id)
        if mark is None or not self._expects(mark):
            return self.feed(stream.push(token_id))
        stream.skip()
        return joined([self._release(), self._mark(mark)])

    def feed(self, text: str) -> AnswerSplit:
        """Add text, and return the parts that are complete."""
        text, self._held = self._held + text, ""
        parts: list[AnswerSplit] = []
        while text:
            expected = [mark for mark in self._texts if self._expects(mark)]
            found = min(((at, mark) for mark in expected if (at := text.find(mark)) >= 0), default=None)
            if found is None:
                kept = max((start_of(mark, text) for mark in expected), default=0)
                parts.append(self._plain(text[: len(text) - kept]))
                self._held = text[len(text) - kept :]
                break
            at, mark = found
            parts.append(self._plain(text[:at]))
            text = text[at:]
            if self._expects(mark):  # False if the text before it has begun the answer
                parts.append(self._mark(mark))
                text = text[len(mark) :]
        return joined(parts)

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        return len(self._held)

    @property
    def unfinished(self) -> bool:
        """True if a thought has begun, and the answer after it has not."""
        return self.thinking

    def end(self) -> AnswerSplit:
        """End the answer, and return the held-back text."""
        return joined([self._release(), self._rest()])

    @abstractmethod
    def _expects(self, mark: str) -> bool:
        """Return True if a mark is meaningful at this point."""

    @abstractmethod
    def _mark(self, mark: str) -> AnswerSplit:
        """Process a mark."""

    @abstractmethod
    def _plain(self, text: str) -> AnswerSplit:
        """Process text without marks."""

    def _rest(self) -> AnswerSplit:
        return AnswerSplit()

    def _release(self) -> AnswerSplit:
        held, self._held = self._held, ""
        return self._plain(held) if held else AnswerSplit()


def joined(parts: Iterable[AnswerSplit]) -> AnswerSplit:
    """Join consecutive parts."""
    parts = list(parts)
    return AnswerSplit("".join(part.reasoning for part in parts), "".join(part.text for part in parts))


class ReasoningParser(ABC):
    """The format in which a family of models writes its thoughts. One object belongs to one tokenizer and template.

    Args:
        tokenizer: The tokenizer, for the ids of marks.
        written: The text that the chat template writes around a thought.

    Attributes:
        opening: The token ids that open a thought.
        closing: The token ids that close it and begin the answer; a budget forces them.
    """

    order: ClassVar[int] = 100
    """``auto`` tries parsers in this order."""

    marks: ClassVar[tuple[str, ...]]
    """The texts that separate thought and answer, as they may occur in the tokenizer."""

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, written: WrittenThought) -> None:
        self.written = written
        known = {mark: encoded(tokenizer, mark) for mark in self.marks}
        self.ids = {ids[0]: mark for mark, ids in known.items() if len(ids) == 1}
        self.texts = tuple(mark for mark, ids in known.items() if len(ids) != 1)

    @classmethod
    @abstractmethod
    def matches(cls, written: WrittenThought) -> bool:
        """Return True if a template writes this format."""

    @abstractmethod
    def splitter(self, tail: str) -> Splitter | None:
        """Create the splitter of an answer; None if its prompt has closed the thought.

        Args:
            tail: The end of the prompt's text, with control tokens.
        """

    def splitter_within(self, begun: str) -> Splitter | None:
        """Create the splitter of an answer that continues a message; None outside a thought."""
        return None


@dataclass(frozen=True)
class Thinking:
    """How one answer may think.

    Attributes:
        parser: The parser of the model.
        tail: The end of the prompt's text.
        budget: Maximum number of tokens of the thought, which the engine then closes; None: no limit.
        continued: The text of the message that the answer continues; None or empty if it begins a message.
    """

    parser: ReasoningParser
    tail: str
    budget: int | None = None
    continued: str | None = None

    def splitter(self) -> Splitter | None:
        """Create the splitter of an answer; None if it cannot begin with a thought."""
        if self.continued:
            return self.parser.splitter_within(self.continued)
        return self.parser.splitter(self.tail)


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Encode a text as if in the middle of a line, since some tokenizers add a space at the start of a text."""
    anchor = list(tokenizer.encode("a", add_special_tokens=False))
    ids = list(tokenizer.encode(f"a{text}", add_special_tokens=False))
    if ids[: len(anchor)] != anchor:
        ids = [*anchor, *tokenizer.encode(text, add_special_tokens=False)]
    return tuple(ids[len(anchor) :])


def start_of(mark: str, text: str) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
