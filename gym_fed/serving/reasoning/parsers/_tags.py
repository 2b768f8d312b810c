"""The base class of parsers for model families that write a thought between two tags, and then the answer."""

from __future__ import annotations

from typing import Any, ClassVar

from gym_fed.serving.reasoning.base import AnswerSplit, ReasoningParser, Splitter, WrittenThought, encoded

OPEN, CLOSE = "<think>", "</think>"


class TagParser(ReasoningParser):
    """Parses ``<think>THOUGHT</think>ANSWER``; the prompt may already contain the first tag."""

    marks = (OPEN, CLOSE)
    assumes_open: ClassVar[bool] = False
    """True if an answer begins inside a thought even though its prompt does not show it."""

    def __init__(self, tokenizer: Any, written: WrittenThought) -> None:
        super().__init__(tokenizer, written)
        shown = written.before is not None and written.after.strip() == CLOSE
        begun = (written.before or "").rpartition(OPEN)[0]
        between = begun.rpartition(written.prompt)[2] if written.prompt else ""
        self.opening = encoded(tokenizer, f"{'' if between.strip() else between}{OPEN}")
        self.closing = encoded(tokenizer, written.after if shown else f"\n{CLOSE}\n\n")

    def splitter(self, tail: str) -> Splitter | None:
        end = tail.rstrip()
        if end.endswith(CLOSE):
            return None
        opens = self.written.prompt.rstrip().endswith(OPEN)
        return TagSplitter(
            self.ids, self.texts, opened=end.endswith(OPEN) or (self.assumes_open and not opens)
        )

    def splitter_within(self, begun: str) -> Splitter | None:
        _, opened, thought = begun.rpartition(OPEN)
        if not opened or CLOSE in thought:
            return None
        return TagSplitter(self.ids, self.texts, opened=True)


class TagSplitter(Splitter):
    """Splits an answer of ``TagParser``. Line breaks next to the tags belong to neither part.

    Args:
        opened: True if the answer begins inside the thought.
    """

    def __init__(self, ids: dict[int, str], texts: tuple[str, ...], *, opened: bool) -> None:
        super().__init__(ids, texts)
        self.thinking, self.waiting = opened, not opened
        self._blank = ""  # white space that may turn out to be next to a tag
        self._first = True  # True until the current part has text
        self._thought = opened

    @property
    def held(self) -> int:
        return super().held + len(self._blank)

    def _answer(self) -> None:
        self.thinking, self.waiting, self.answering = False, False, True
        self._blank, self._first = "", True

    def _expects(self, mark: str) -> bool:
        if self.answering:
            return False
        # A model whose prompt opened the thought may write the tag again
        return mark == (OPEN if self.waiting else CLOSE) or (self.thinking and self._first and mark == OPEN)

    def _mark(self, mark: str) -> AnswerSplit:
        if mark == CLOSE:
            self._answer()
        else:
            self.thinking, self.waiting, self._thought = True, False, True
            self._blank, self._first = "", True
        return AnswerSplit()

    def _plain(self, text: str) -> AnswerSplit:
        text, self._blank = self._blank + text, ""
        if self.waiting:
            if not text.strip():
                self._blank = text
                return AnswerSplit()
            self._answer()
        if self._first and self._thought:
            text, broken = text.lstrip("\n"), bool(text)
            self.dropped = broken and not text
        self._first = self._first and not text
        if self.thinking:
            text, blank = text.rstrip("\n"), text
            self._blank = blank[len(text) :]
            return AnswerSplit(reasoning=text)
        return AnswerSplit(text=text)

    def _rest(self) -> AnswerSplit:
        """Return white space that is the whole answer; line breaks after a thought are dropped."""
        blank, self._blank = self._blank, ""
        return AnswerSplit(text=blank) if self.waiting else AnswerSplit()
