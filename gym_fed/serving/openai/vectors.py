"""Embeddings that were let in: all texts of a request at once, with threads or asyncio, and always cleaned up."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from gym_fed.errors import GymError


class Embedding(Protocol):
    """One text of the engine's, on its way to a vector."""

    @property
    def done(self) -> bool: ...

    def cancel(self) -> None: ...

    def result(self) -> Any:
        """``[hidden] float32``: the mean of the last hidden states over the text."""

    async def result_async(self) -> Any: ...


class PendingVectors:
    """A request for embeddings. Drive it to its end once, with ``run`` or ``arun``.

    Whatever ends it, an error or the caller's going away too, texts that were not read yet are called off, and the
    tokens of those that were are told.

    Args:
        model: The name that was asked for.
        embeddings: One for each text, in order.
        lengths: Tokens of each text.
        encoding: ``base64`` packs a vector's float32 numbers, little end first.
        told: How an error of the engine's is told.
        on_end: Told how many tokens were read.
    """

    def __init__(
        self,
        model: str,
        embeddings: Sequence[Embedding],
        lengths: Sequence[int],
        encoding: Literal["float", "base64"],
        told: Callable[[GymError], GymError],
        on_end: Callable[[int], None],
    ) -> None:
        self._model = model
        self._embeddings = embeddings
        self._lengths = lengths
        self._encoding = encoding
        self._told = told
        self._on_end = on_end
        self._failed: int | None = None
        self._ended = False

    def run(self) -> dict[str, Any]:
        """The whole answer."""
        vectors = []
        try:
            for index, embedding in enumerate(self._embeddings):
                self._failed = index
                vectors.append(embedding.result())
            self._failed = None
        except GymError as error:
            raise self._told(error) from error
        finally:
            self.end()
        return self._body(vectors)

    async def arun(self) -> dict[str, Any]:
        """As ``run``."""
        vectors = []
        try:
            for index, embedding in enumerate(self._embeddings):
                self._failed = index
                vectors.append(await embedding.result_async())
            self._failed = None
        except GymError as error:
            raise self._told(error) from error
        finally:
            self.end()
        return await asyncio.to_thread(self._body, vectors)

    def end(self) -> None:
        """Call off what still waits. May be called again, and without having been driven."""
        if self._ended:
            return
        self._ended = True
        read = 0
        for index, (embedding, length) in enumerate(zip(self._embeddings, self._lengths, strict=True)):
            if index == self._failed or not embedding.done:
                embedding.cancel()  # nothing, for one that has ended
            else:
                read += length
        self._on_end(read)

    def _body(self, vectors: list[Any]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._shown(_unit(vector.tolist()))}
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
