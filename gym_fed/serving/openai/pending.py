"""A request that was let in: driven to its end with threads or asyncio, whole or as a stream, and always cleaned up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any, Protocol

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.openai.answers import Answer, Chunk
from gym_fed.serving.request import Event


class Generating(Protocol):
    """One answer of the engine, on its way."""

    def __iter__(self) -> Iterator[Event]: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None: ...


class Pending:
    """A request that was let in. Drive it to its end once, with ``run``, ``arun``, ``chunks`` or ``achunks``.

    Whatever ends it, an error or the caller's going away too, what was not written yet is cancelled, and what was
    used is told.

    Args:
        answer: Takes the events.
        generations: One for each choice.
        told: How an error of the engine's is told.
        on_end: Called once, when it has ended.
    """

    def __init__(
        self,
        answer: Answer,
        generations: list[Generating],
        told: Callable[[GymError], GymError],
        on_end: Callable[[], None],
    ) -> None:
        self._answer = answer
        self._generations = generations
        self._told = told
        self._on_end = on_end
        self._opened = False
        self._ended = False

    def run(self) -> dict[str, Any]:
        """The whole answer."""
        for _ in self.chunks():
            pass
        return self._answer.body()

    async def arun(self) -> dict[str, Any]:
        """As ``run``."""
        async for _ in self.achunks():
            pass
        return self._answer.body()

    def chunks(self) -> Generator[Chunk]:
        """The answer piece by piece; of several choices one after the other."""
        try:
            for index, generation in enumerate(self._generations):
                for event in generation:
                    yield from self._first()
                    yield from self._answer.take(index, _without_error(event))
            yield from self._answer.closing()
        except GymError as error:
            raise self._told(error) from error
        finally:
            self.end()

    async def achunks(self) -> AsyncGenerator[Chunk]:
        """As ``chunks``."""
        try:
            for index, generation in enumerate(self._generations):
                async for event in generation:
                    for chunk in (*self._first(), *self._answer.take(index, _without_error(event))):
                        yield chunk
            for chunk in self._answer.closing():
                yield chunk
        except GymError as error:
            raise self._told(error) from error
        finally:
            self.end()

    def _first(self) -> list[Chunk]:
        """The opening, once the engine has begun: what it refuses until then is no stream yet."""
        if self._opened:
            return []
        self._opened = True
        return self._answer.opening()

    def end(self) -> None:
        """Cancel what still runs. May be called again, and without having been driven."""
        if self._ended:
            return
        self._ended = True
        for generation in self._generations:
            generation.cancel()  # nothing, for one that has ended
        self._on_end()


def _without_error(event: Event) -> Event:
    if event.finish_reason == "error":
        raise GymError(
            ErrorCode.INTERNAL, "the engine could not finish this answer", "the server's log tells why"
        )
    return event
