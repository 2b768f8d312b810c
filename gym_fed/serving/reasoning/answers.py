"""Decode complete answers from token ids, and separate their thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from gym_fed.serving.engine.detokenizing import TextDecoder, TextStream
from gym_fed.serving.reasoning.base import TAIL_TOKENS, AnswerSplit, Splitter, Thinking, encoded, joined
from gym_fed.serving.reasoning.detection import AUTO, name_of, reasoning_parser


class ReadAnswer(NamedTuple):
    """An answer and its thought.

    Attributes:
        text: The answer after the thought.
        thought: The text of the thought.
        is_unfinished: True if the answer ended before its text began, inside the thought or directly after it.
    """

    text: str
    thought: str = ""
    is_unfinished: bool = False


class AnswerReader:
    """Decodes answers with one tokenizer, whose chat template determines how thoughts are written.

    Only answers to prompts of the chat template have thoughts. Such prompts are recognised by the generation prompt, so
    the template must have one. Other answers are not split.

    Attributes:
        thinks: True if the template has thoughts.
        name: The name of the parser; ``none`` without one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._parser = reasoning_parser(AUTO, tokenizer)
        self.thinks = self._parser is not None
        self.name = name_of(self._parser)

    @cached_property
    def _decoder(self) -> TextDecoder:
        """The decoder, created on first use: it copies the whole vocabulary."""
        return TextDecoder(self._tokenizer)

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking | None:
        """Return how the answer to a prompt may think; None if it has no thought."""
        if self._parser is None:
            return None
        tail = str(self._tokenizer.decode(list(prompt_ids[-TAIL_TOKENS:]), skip_special_tokens=False))
        prompt = self._parser.written.prompt
        is_chat = bool(prompt) and tail.endswith(prompt)
        return Thinking(self._parser, tail) if is_chat and self._parser.splitter(tail) else None

    def has_headers(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if even answers without a thought have marks around their text."""
        thinking = self.thinking(prompt_ids)
        splitter = None if thinking is None else thinking.splitter()
        return splitter is not None and not splitter.waiting

    def without_thought(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return a prompt that ends with an empty thought, so that the answer follows directly."""
        thinking = self.thinking(prompt_ids)
        splitter = None if thinking is None else thinking.splitter()
        if thinking is None or splitter is None:
            return list(prompt_ids)
        if splitter.thinking:
            return [*prompt_ids, *thinking.parser.closing]
        written = thinking.parser.written
        if written.prompt in (written.before or ""):
            opening = str(written.before).rpartition(written.prompt)[2]
            return [*prompt_ids, *encoded(self._tokenizer, opening + written.after)]
        return [*prompt_ids, *thinking.parser.opening, *thinking.parser.closing]

    def stream(self, prompt_ids: Sequence[int]) -> AnswerStream:
        """Open the stream of an answer to a prompt."""
        thinking = self.thinking(prompt_ids)
        splitter = None if thinking is None else thinking.splitter()
        return AnswerStream(self._decoder.stream(prompt_ids), splitter)

    def read(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> ReadAnswer:
        """Decode an answer without special tokens; ``answer_ids`` must not include the end token."""
        if self.thinking(prompt_ids) is None:
            # Decoded alone, as in the harness, since the text of a stream continues the prompt
            return ReadAnswer(str(self._tokenizer.decode(list(answer_ids), skip_special_tokens=True)))
        stream = self.stream(prompt_ids)
        split = joined([*map(stream.push, answer_ids), stream.end()])
        return ReadAnswer(split.text, split.reasoning, stream.is_unfinished)


class AnswerStream:
    """Decodes an answer token by token, and separates its thought.

    Args:
        stream: The stream that decodes the answer's text.
        splitter: The splitter of the answer; None if it has no thought.
    """

    def __init__(self, stream: TextStream, splitter: Splitter | None) -> None:
        self._stream, self._splitter = stream, splitter

    @property
    def is_unfinished(self) -> bool:
        """True if a thought has begun, and the answer after it has not."""
        return self._splitter is not None and self._splitter.unfinished

    def push(self, token_id: int) -> AnswerSplit:
        """Add a token, and return the text that is now complete."""
        if self._splitter is None:
            return AnswerSplit(text=self._stream.push(token_id))
        return self._splitter.push(token_id, self._stream)

    def end(self) -> AnswerSplit:
        """Return the held-back text at the end."""
        return AnswerSplit() if self._splitter is None else self._splitter.end()
