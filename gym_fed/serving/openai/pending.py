"""Accepted requests: run them in threads or with asyncio, for one body or a stream, with guaranteed cleanup."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import Event
from gym_fed.serving.openai.answers import Answer, StreamChunk

if TYPE_CHECKING:
    from gym_fed.serving.engine.request import Generation, PendingEmbedding
    from gym_fed.serving.filter.content_filter import JudgedGeneration


class Pending:
    """An accepted request for text. Run it once, with ``run``, ``arun``, ``chunks`` or ``achunks``.

    However it ends, even by an error or a disconnect, unfinished answers are cancelled and the usage is reported.

    Args:
        answer: The answer, which is built from the events.
        generations: One for each choice.
        translate: Converts an error of the engine to one for the client.
        on_end: Called once, after the request has ended.
    """

    def __init__(
        self,
        answer: Answer,
        generations: Sequence[Generation | JudgedGeneration],
        translate: Callable[[GymError], GymError],
        on_end: Callable[[], None],
    ) -> None:
        self._answer = answer
        self._generations = generations
        self._translate = translate
        self._on_end = on_end
        self._opened = False
        self._ended = False

    @property
    def used_tokens(self) -> int:
        """Tokens of prompts and answers so far."""
        return self._answer.prompt_tokens + self._answer.completion_tokens

    @property
    def ends_with_done(self) -> bool:
        """See ``Answer``."""
        return self._answer.ends_with_done

    def failure(self, error: dict[str, Any]) -> StreamChunk:
        """See ``Answer``."""
        return self._answer.failure(error)

    def run(self) -> dict[str, Any]:
        """Return the whole answer."""
        for _ in self.chunks():
            pass
        return self._answer.body()

    async def arun(self) -> dict[str, Any]:
        """Return the whole answer, without blocking the event loop."""
        async for _ in self.achunks():
            pass
        return self._answer.body()

    def chunks(self) -> Generator[StreamChunk]:
        """Yield the answer in chunks, one choice after the other."""
        try:
            for index, generation in enumerate(self._generations):
                for event in generation:
                    yield from self._first()
                    yield from self._answer.take(index, _without_error(event))
                    if self._answer.ended(index):
                        generation.cancel()  # has no effect unless the answer was refused before its end
                        break
            yield from self._answer.closing()
        except GymError as error:
            raise self._translate(error) from error
        finally:
            self.end()

    async def achunks(self) -> AsyncGenerator[StreamChunk]:
        """Yield the answer in chunks; those of several choices are interleaved as their tokens arrive."""
        events = _interleaved(self._generations)
        try:
            async for index, event in events:
                if self._answer.ended(index):
                    continue
                for chunk in (*self._first(), *self._answer.take(index, _without_error(event))):
                    yield chunk
                if self._answer.ended(index):
                    self._generations[index].cancel()
            closing = self._answer.closing
            for chunk in await asyncio.to_thread(closing) if self._answer.keeps else closing():
                yield chunk
        except GymError as error:
            raise self._translate(error) from error
        finally:
            self.end()
            await events.aclose()

    def _first(self) -> list[StreamChunk]:
        """Return the opening chunks at the engine's first event, so that an earlier error is not sent as a stream."""
        if self._opened:
            return []
        self._opened = True
        return self._answer.opening()

    def end(self) -> None:
        """Cancel unfinished answers. May be called repeatedly, and before the request has run."""
        if self._ended:
            return
        self._ended = True
        for generation in self._generations:
            generation.cancel()  # no effect on one that has ended
        self._on_end()


async def _interleaved(
    generations: Sequence[Generation | JudgedGeneration],
) -> AsyncGenerator[tuple[int, Event]]:
    """Merge the events of several answers as they arrive, each with the index of its answer."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    readers = [aiter(generation) for generation in generations]
    waiting = {asyncio.ensure_future(_next(reader)): index for index, reader in enumerate(readers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                if (next_event := task.result()) is not None:
                    waiting[asyncio.ensure_future(_next(readers[index]))] = index
                    yield index, next_event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(reader: AsyncIterator[Event]) -> Event | None:
    """Return the next event; None after the last."""
    return await anext(reader, None)


class PendingRefusal(Pending):
    """A request that the content filter refused, whose answer needs no computation.

    Args:
        answer: The answer, whose choices return the refusal for any event.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer, [], lambda error: error, lambda: None)

    def chunks(self) -> Generator[StreamChunk]:
        """Yield the refusal in the form of the answer."""
        yield from self._answer.opening()
        for index in range(len(self._answer.choices)):
            yield from self._answer.take(index, Event("", finish_reason="stop"))
        yield from self._answer.closing()

    async def achunks(self) -> AsyncGenerator[StreamChunk]:
        """Yield the refusal in the form of the answer."""
        for chunk in self.chunks():
            yield chunk


def _without_error(event: Event) -> Event:
    if event.finish_reason == "error":
        raise GymError(ErrorCode.INTERNAL, "the engine could not finish this answer", "see the server's log")
    return event


class PendingVectors:
    """An accepted request for embeddings. Run it once, with ``run`` or ``arun``.

    However it ends, even by an error or a disconnect, unfinished texts are cancelled, and the tokens of finished texts
    are reported.

    Args:
        model: The requested name.
        embeddings: One for each text, in order.
        lengths: The number of tokens of each text.
        encoding: ``base64`` encodes a vector's float32 numbers in little-endian order.
        translate: Converts an error of the engine to one for the client.
        on_end: Called with the number of tokens of the finished texts.
        dimensions: The number of leading values of each vector to return; None: all.
    """

    def __init__(
        self,
        model: str,
        embeddings: Sequence[PendingEmbedding],
        lengths: Sequence[int],
        encoding: Literal["float", "base64"],
        translate: Callable[[GymError], GymError],
        on_end: Callable[[int], None],
        dimensions: int | None = None,
    ) -> None:
        self._model = model
        self._embeddings = embeddings
        self._lengths = lengths
        self._encoding = encoding
        self._translate = translate
        self._on_end = on_end
        self._dimensions = dimensions
        self._failed: int | None = None
        self._ended = False
        self.used_tokens = 0
        """Tokens of the finished texts; set at the end."""

    def run(self) -> dict[str, Any]:
        """Return the whole answer."""
        vectors = []
        try:
            for index, embedding in enumerate(self._embeddings):
                self._failed = index
                vectors.append(embedding.result())
            self._failed = None
        except GymError as error:
            raise self._translate(error) from error
        finally:
            self.end()
        return self._body(vectors)

    async def arun(self) -> dict[str, Any]:
        """Return the whole answer, without blocking the event loop."""
        vectors = []
        try:
            for index, embedding in enumerate(self._embeddings):
                self._failed = index
                vectors.append(await embedding.result_async())
            self._failed = None
        except GymError as error:
            raise self._translate(error) from error
        finally:
            self.end()
        return await asyncio.to_thread(self._body, vectors)

    def end(self) -> None:
        """Cancel unfinished texts. May be called repeatedly, and before the request has run."""
        if self._ended:
            return
        self._ended = True
        for index, (embedding, length) in enumerate(zip(self._embeddings, self._lengths, strict=True)):
            if index == self._failed or not embedding.done:
                embedding.cancel()  # no effect on one that has ended
            else:
                self.used_tokens += length
        self._on_end(self.used_tokens)

    def _body(self, vectors: list[Any]) -> dict[str, Any]:
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": self._shown(_unit(vector.tolist()[: self._dimensions])),
            }
            for index, vector in enumerate(vectors)
        ]
        used = sum(self._lengths)
        usage = {"prompt_tokens": used, "total_tokens": used}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _shown(self, vector: list[float]) -> list[float] | str:
        if self._encoding == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _unit(vector: list[float]) -> list[float]:
    length = sum(value * value for value in vector) ** 0.5
    return [value / length for value in vector] if length else vector
