"""An engine with scripted answers, for tests of the layers above it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.serving.engine.request import Event, FinishReason, GenerationRequest, TokenLogprob
from gym_fed.serving.engine.stats import Counters, EngineStats

Script = Callable[[GenerationRequest], str]


class ScriptedGeneration:
    """One character an event; with ``endless`` no end comes."""

    def __init__(
        self,
        text: str,
        finish: FinishReason,
        *,
        with_logprobs: bool,
        endless: bool,
        late: GymError | None = None,
    ) -> None:
        self.text, self.finish, self.late = text, finish, late
        self.with_logprobs, self.endless = with_logprobs, endless
        self.cancelled = False

    def __iter__(self) -> Iterator[Event]:
        if self.late is not None:
            raise self.late
        for number, letter in enumerate(self.text):
            data = letter.encode()
            top = ((number, data, -0.25), (number + 1, b"?", -2.0))
            token = TokenLogprob(number, data, -0.25, top, number, number + 1)
            logprobs = (token,) if self.with_logprobs else ()
            yield Event(letter, (number,), logprobs)
        yield Event("", (258,), (), self.finish)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self:
            if event.finish_reason is not None and self.endless:
                await asyncio.Event().wait()
            yield event

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedEmbedding:
    """Made at once, or never."""

    def __init__(self, vector: list[float], *, done: bool, late: GymError | None) -> None:
        self.vector, self.done, self.late = vector, done, late
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def result(self) -> Any:
        assert self.done
        if self.late is not None:
            raise self.late
        return SimpleNamespace(tolist=lambda: self.vector)

    async def result_async(self) -> Any:
        if not self.done:
            await asyncio.Event().wait()
        return self.result()


class ScriptedEngine:
    """Remembers what it was asked.

    Args:
        script: The answer to a request.
        finish: How it ends.
        error: Raised by ``submit`` once ``after`` requests were taken.
        after: See ``error``.
        late: Raised by what was let in.
        endless: Whether answers never end, nor embeddings after the first.
    """

    def __init__(
        self,
        script: Script = lambda request: "hello",
        *,
        finish: FinishReason = "stop",
        error: GymError | None = None,
        after: int = 0,
        endless: bool = False,
        late: GymError | None = None,
    ) -> None:
        self.late = late
        self.script, self.finish, self.error, self.after, self.endless = script, finish, error, after, endless
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.embeddings: list[ScriptedEmbedding] = []

    def submit(self, request: GenerationRequest) -> ScriptedGeneration:
        if self.error is not None and len(self.requests) >= self.after:
            raise self.error
        self.requests.append(request)
        logprobs = request.sampling.logprobs is not None
        made = ScriptedGeneration(
            self.script(request),
            self.finish,
            with_logprobs=logprobs,
            endless=self.endless,
            late=self.late,
        )
        self.generations.append(made)
        return made

    def embed(self, prompt_ids: list[int], variant: str | None, user: str) -> ScriptedEmbedding:
        if self.error is not None and len(self.embeddings) >= self.after:
            raise self.error
        made = ScriptedEmbedding(
            [3.0, 4.0 * len(prompt_ids)], done=not self.endless or not self.embeddings, late=self.late
        )
        self.embeddings.append(made)
        return made

    def stats(self) -> EngineStats:
        zero = Counters()
        counts = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        fields: dict[str, Any] = {
            **counts,
            "healthy": True,
            "finished": dict(zero.finished),
            "forwards": {"decoder": 2, "transformers": 0, "general": 0},
            "sign_products": {},
            "packed_products": {"levels": 3},
        }
        return EngineStats(
            **{**fields, "first_token": zero.first_token.snapshot(), "per_token": zero.per_token.snapshot()}
        )

    def retry_after_seconds(self) -> int:
        return 7
