"""The queue in front of vLLM: fair admission, verified variants, and one stream per running answer.

Everything here runs on one event loop. At most ``max_concurrent`` requests are inside vLLM. All others wait here, so
that users are served according to gym-fed's counters instead of in order of arrival. While vLLM is unavailable, no
request is admitted: waiting ones keep their places, and running ones fail with ``UNAVAILABLE``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.admission import AdmissionQueue
from gym_fed.serving.engine.sampling import SampledToken
from gym_fed.serving.engine.scheduler import ANSWER_WEIGHT, TokenCounters
from gym_fed.serving.engine.sequence import GenerationSequence, ScheduledRequest
from gym_fed.serving.vllm.bodies import AnswerChunk, CacheSalts, completion_body
from gym_fed.serving.vllm.client import NotConnectedError

if TYPE_CHECKING:
    from gym_fed.serving.engine.request import FinishReason
    from gym_fed.serving.engine.stats import Counters
    from gym_fed.serving.forward.variant_weights import VariantSource
    from gym_fed.serving.vllm.client import VllmClient

log = logging.getLogger("gym_fed")


class _RemoteCache:
    """Accepts every request, since vLLM manages the KV blocks."""

    def allocate(self, request: ScheduledRequest) -> bool:
        """Return True."""
        return True


class VllmLoop:
    """The waiting and the running requests.

    Args:
        client: The client of vLLM.
        base: The base's name in vLLM.
        source: The source of variants.
        max_concurrent: Maximum number of requests inside vLLM.
        salts: The salts of the prefix cache.
        counters: The counters of the engine.
        vocab_size: The number of the base's token ids.
    """

    def __init__(
        self,
        client: VllmClient,
        base: str,
        source: VariantSource | None,
        max_concurrent: int,
        salts: CacheSalts,
        counters: Counters,
        vocab_size: int,
    ) -> None:
        self._client, self._base = client, base
        self._max_concurrent, self._salts, self._counters = max_concurrent, salts, counters
        self._tokens = TokenCounters()
        self._admission = AdmissionQueue(self._tokens, source, _RemoteCache(), self._fail, vocab_size)
        self._tasks: dict[ScheduledRequest, asyncio.Task[None]] = {}
        self.on_end: Callable[[], None] = lambda: None
        """Called when an answer ends, so that there is room for another."""
        self.on_away: Callable[[], None] = lambda: None
        """Called when vLLM cannot be reached, or stops during an answer."""

    # May be called from any thread.

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def waiting(self) -> int:
        return len(self._admission.waiting)

    def waiting_of(self, user: str) -> int:
        return self._admission.waiting.count(user)

    # Called on the event loop.

    def put(self, request: ScheduledRequest) -> None:
        """Append a new request to its user's queue."""
        self._admission.put(request)

    def admit(self) -> None:
        """Start waiting requests while there is room, the least served user's first."""
        for request in self._admission.admit(self._max_concurrent - self.running):
            assert isinstance(request, GenerationSequence)
            self._tasks[request] = asyncio.get_running_loop().create_task(self._answer(request))

    def cancel(self, request: ScheduledRequest) -> None:
        """End a waiting or running request."""
        if not request.ended:
            self._end(request, "cancelled")
            request.cancel()

    async def end_all(self, arrived: list[ScheduledRequest], error: GymError | None) -> None:
        """Cancel or fail every request, including those in ``arrived``."""
        tasks = list(self._tasks.values())
        for request in [*self._tasks, *self._admission.waiting, *arrived]:
            if error is None:
                self.cancel(request)
            else:
                self._fail(request, error)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, sequence: GenerationSequence) -> None:
        try:
            await self._stream(sequence)
        except NotConnectedError:
            self.on_away()
            self._put_back(sequence)
        except GymError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                self.on_away()
            self._fail(sequence, error)
        except Exception as failure:
            log.exception("a request to vLLM failed")
            self._fail(
                sequence, GymError(ErrorCode.INTERNAL, f"the request failed: {failure!r}", "see the log")
            )
        finally:
            self._tasks.pop(sequence, None)
            self.on_end()

    def _put_back(self, sequence: GenerationSequence) -> None:
        """Return a request that never reached vLLM to the front of its user's queue."""
        del self._tasks[sequence]
        self._tokens.running[sequence.user] -= 1
        self._admission.put_back(sequence)

    async def _stream(self, sequence: GenerationSequence) -> None:
        request = sequence.generation.request
        variant = sequence.variant
        body = completion_body(
            self._base if variant is None else variant.delta_sha256,
            sequence.prompt_ids,
            request.sampling,
            max_tokens=sequence.max_tokens,
            end_ids=sequence.end_ids,
            salt=self._salts.salt(request.user, request.key_digest, request.variant, request.cache_key),
        )
        self._counters.prompt_tokens += len(sequence.prompt_ids)
        last: AnswerChunk | None = None
        async with aclosing(self._client.generate(body)) as chunks:
            async for chunk in chunks:
                if chunk.cached_tokens is not None:
                    sequence.cached_tokens = chunk.cached_tokens
                    self._counters.cached_tokens += chunk.cached_tokens
                elif chunk.finish_reason is not None:
                    last = chunk  # handled after the usage, which follows it and belongs to the last event
                elif (reason := self._push(sequence, chunk)) is not None:
                    self._finish(
                        sequence, reason
                    )  # a stop text; closing the stream cancels the answer in vLLM
                    return
        if last is None or last.finish_reason not in ("stop", "length"):
            raise GymError(
                ErrorCode.UNAVAILABLE,
                "vLLM ended the answer without a finish reason",
                "try again in a moment",
            )
        end: FinishReason = "length" if last.finish_reason == "length" else "stop"
        self._finish(sequence, self._push(sequence, last) or sequence.finish(end))

    def _push(self, sequence: GenerationSequence, chunk: AnswerChunk) -> FinishReason | None:
        """Add the tokens of a chunk, and return the finish reason at the answer's end."""
        counters, now = self._counters, time.monotonic()
        for place, token_id in enumerate(chunk.token_ids):
            if sequence.token_ids:
                counters.per_token.add(now - sequence.last_token_at)
            else:
                counters.first_token.add(now - sequence.submitted)
            sequence.last_token_at = now
            counters.generated_tokens += 1
            self._tokens.charge(sequence.user, ANSWER_WEIGHT)
            logprob = chunk.logprobs[place] if chunk.logprobs else None
            if (reason := sequence.push(SampledToken(token_id, logprob), now)) is not None:
                return reason
        return None

    def _finish(self, sequence: GenerationSequence, reason: FinishReason) -> None:
        self._end(sequence, reason)
        sequence.deliver()

    def _fail(self, request: ScheduledRequest, error: GymError) -> None:
        self._end(request, "error")
        request.fail(error)

    def _end(self, request: ScheduledRequest, reason: str) -> None:
        """Free a request's slot and variant before the caller receives the result."""
        if request.ended:
            return
        request.ended = True
        self._counters.finished[reason] += 1
        task = self._tasks.pop(request, None)
        if task is None:
            self._admission.waiting.remove(request)
        else:
            self._tokens.running[request.user] -= 1
            self._counters.served(request.started)
            if task is not asyncio.current_task():
                task.cancel()
        self._admission.release(request)
        self._tokens.leave(request.user)
