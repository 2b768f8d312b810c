"""The engine's step: admit requests, run one forward for all that run, choose a token for each that decodes.

One thread runs it. A step has one token of every request in decode; chunks of prefill fill the rest of
``max_batch_tokens``. So a long prompt is prefilled beside answers and does not stop them.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.config.serving import EngineConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.engine.fair_queue import ANSWER_WEIGHT, PROMPT_WEIGHT, FairQueue, TokenCounters
from gym_fed.serving.engine.guided import banned_by
from gym_fed.serving.engine.sampling import Row, SampledToken, choose
from gym_fed.serving.engine.sequence import EmbeddingSequence, GenerationSequence, ScheduledRequest
from gym_fed.serving.engine.stats import Counters
from gym_fed.serving.forward.loaded import LoadedVariant, VariantSource
from gym_fed.serving.forward.multi_variant import Chunk

if TYPE_CHECKING:
    from gym_fed.serving.engine.detokenizing import TextDecoder
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

log = logging.getLogger("gym_fed")

_MOST_LOADING = 64
"""Variants that are loading at once; more would evict one another."""

_BYPASS_TIMEOUT_SECONDS = 5.0
"""How long other requests may bypass one whose variant finds no room because theirs are in use. After
that no other request with a variant is admitted first, or the one might starve. A slow load may always be bypassed."""

_BROKEN = 3
"""Consecutive failed steps after which the engine is unhealthy."""


class EngineLoop:
    """The waiting and the running requests, and the step that advances them."""

    def __init__(
        self,
        served: MultiVariantModel,
        decoder: TextDecoder,
        source: VariantSource | None,
        config: EngineConfig,
        counters: Counters,
    ) -> None:
        self._model = served
        self._decoder = decoder
        self._source = source
        self._config = config
        self._counters = counters
        self._tokens = TokenCounters()
        self._waiting = FairQueue(self._tokens)
        self._running: list[ScheduledRequest] = []
        self._guides = ThreadPoolExecutor(1, thread_name_prefix="gym-fed-guide")

    # For any thread.

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_of(self, user: str) -> int:
        return self._waiting.count(user)

    @property
    def healthy(self) -> bool:
        return self._counters.failed_in_a_row < _BROKEN

    # For the engine's thread.

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until a request is submitted."""
        return not self._running and not self.waiting

    def put(self, request: ScheduledRequest) -> None:
        """Append a new request to its user's queue."""
        self._tokens.arrive(request.user)
        self._waiting.put(request)

    def release_variants(self) -> None:
        """Called when idle: drop the references to the last step's variants."""
        self._model.release_variants()

    def cancel(self, request: ScheduledRequest) -> None:
        """End a waiting or running request."""
        if request.ended:
            return
        try:
            self._end(request, "cancelled")
            request.cancel()
        except Exception as failure:  # noqa: BLE001 - logged; it fails this request alone
            self._report_failure(request, failure)

    def step(self) -> bool:
        """Admit requests and run one forward; returns whether anything ran."""
        started = time.monotonic()
        self._admit()
        if not self._running:
            return False
        self._run_step()
        self._counters.busy_seconds += time.monotonic() - started
        return True

    def end_all(self, arrived: list[ScheduledRequest], error: GymError | None) -> None:
        """Cancel every request, or fail it, also those in ``arrived``; no step may follow.

        Every caller gets an answer, whatever breaks here.
        """
        for request in [*self._running, *self._waiting, *arrived]:
            if error is None:
                self.cancel(request)
            else:
                self._fail(request, error)
        self._guides.shutdown()

    # Admission.

    def _admit(self) -> None:
        absent: dict[str, bool] = {}
        while len(self._running) < self._config.max_concurrent and len(self._waiting):
            if not self._admit_next(absent):
                return

    def _admit_next(self, absent: dict[str, bool]) -> bool:
        """Admit the next request whose variant is in memory; none bypasses one that waits for KV cache."""
        makes_room = False
        for request in self._waiting.by_priority():
            if makes_room and request.variant_name is not None:
                continue
            try:
                ready, variant = self._variant(request.variant_name, absent)
            except GymError as error:
                self._fail(request, error)
                continue
            if not ready:
                makes_room = makes_room or self._has_waited(request, absent)
                continue
            reserved = self._counters.kv_bytes_reserved
            if reserved + request.kv_bytes > self._config.kv_cache_size:
                self._release(variant)
                return False
            request.variant = variant
            request.cache = self._model.new_cache(request.cache_tokens)
            request.started = time.monotonic()
            self._counters.kv_bytes_reserved += request.kv_bytes
            self._tokens.running[request.user] += 1
            self._tokens.charge(request.user, PROMPT_WEIGHT * len(request.prompt_ids))
            self._running.append(request)
            self._waiting.remove(request)
            return True
        return False

    def _has_waited(self, request: ScheduledRequest, absent: dict[str, bool]) -> bool:
        """Whether its variant has found no room for so long that other requests with variants must wait."""
        if request.variant_name is None or not absent.get(request.variant_name, False):
            request.bypassed_since = 0.0
            return False
        now = time.monotonic()
        request.bypassed_since = request.bypassed_since or now
        return now - request.bypassed_since > _BYPASS_TIMEOUT_SECONDS

    def _variant(self, name: str | None, absent: dict[str, bool]) -> tuple[bool, LoadedVariant | None]:
        """Whether the variant is in memory, and the variant itself, pinned.

        ``absent`` collects the variants of this step that are not in memory; their values: whether they lack room.
        """
        if name is None:
            return True, None
        if name in absent or len(absent) >= _MOST_LOADING:
            return False, None
        assert self._source is not None  # submission refuses variants without a source
        try:
            variant = self._source.poll(name)
            if variant is None:
                absent[name] = self._source.lacks_room(name)
        except GymError:
            raise
        except Exception as error:
            log.exception("variant %s could not be loaded", name)
            raise GymError(
                ErrorCode.INTERNAL, f"variant {name} could not be loaded: {error!r}", "the log has the trace"
            ) from error
        return variant is not None, variant

    def _release(self, variant: LoadedVariant | None) -> None:
        """Unpin it. An error of the source is logged: it must not fail the running answers."""
        if variant is None or self._source is None:
            return
        try:
            self._source.release(variant)
        except Exception:
            log.exception("variant %s could not be released", variant.name)

    # One step.

    def _run_step(self) -> None:
        rows, chunks = self._plan()
        wanted = [
            row
            for row, chunk in zip(rows, chunks, strict=True)
            if chunk.wants_logits and isinstance(row, GenerationSequence)
        ]
        masks: Future[dict[int, Any]] | None = None  # made beside the forward, which releases Python's lock
        guides = {place: row.guide for place, row in enumerate(wanted) if row.guide is not None}
        if guides:
            masks = self._guides.submit(banned_by, guides)
        counters = self._counters
        started = time.monotonic()
        logits, failures = self._forward(chunks)
        counters.model_seconds += time.monotonic() - started
        counters.steps += 1
        counters.rows += len(rows)
        for place, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            if place in failures:
                self._fail(row, failures[place])
                continue
            counters.kv_tokens += len(chunk.token_ids)
            counters.rows_with_variants += row.variant is not None
            if row.prefilled < len(row.prompt_ids):
                row.prefilled += len(chunk.token_ids)
                counters.prompt_tokens += len(chunk.token_ids)
            if isinstance(row, EmbeddingSequence) and row.prefilled == len(row.prompt_ids):
                self._settle(row)
        if logits is None:
            return
        for row, sampled in zip(wanted, self._choose(logits, wanted, masks), strict=True):
            if not row.ended:
                self._push(row, sampled)

    def _forward(self, chunks: list[Chunk]) -> tuple[Any, dict[int, GymError]]:
        """Logits of the chunks that want them, and the errors of failed chunks, by place (their logits are 0).

        A failed step leaves the caches unchanged. So each chunk is tried alone, and only the cause fails.
        """
        counters = self._counters
        try:
            logits = self._model.step(chunks)
        except Exception as error:
            if len(chunks) > 1:
                log.warning("a step of %d requests failed (%r); each is tried alone", len(chunks), error)
                return self._forward_alone(chunks)
            counters.failed_steps += 1
            counters.failed_in_a_row += 1
            if isinstance(error, GymError):
                return None, {0: error}
            log.exception("a step failed")
            return None, {0: _internal("the step", error)}
        counters.failed_in_a_row = 0
        return logits, {}

    def _forward_alone(self, chunks: list[Chunk]) -> tuple[Any, dict[int, GymError]]:
        found: list[Any] = []
        failures: dict[int, GymError] = {}
        for place, chunk in enumerate(chunks):
            logits, failed = self._forward([chunk])
            failures.update((place, error) for error in failed.values())
            if chunk.wants_logits:
                found.append(logits)
        alike = next((logits for logits in found if logits is not None), None)
        if alike is None:
            return None, failures
        return torch.cat([alike.new_zeros(alike.shape) if one is None else one for one in found]), failures

    def _plan(self) -> tuple[list[ScheduledRequest], list[Chunk]]:
        """The requests of the step and their chunks: all in decode first, then prefill, least served users first."""
        decode: list[ScheduledRequest] = []
        prefill: list[ScheduledRequest] = []
        chunks: list[Chunk] = []
        for row in self._running:
            (decode if isinstance(row, GenerationSequence) and row.decoding else prefill).append(row)
        left = self._config.max_batch_tokens - bool(prefill)  # one token is always left for prefill
        if len(decode) > left:  # more than a step takes: round robin
            decode, late = decode[:left], decode[left:]
            self._running = [*late, *prefill, *decode]
        for row in decode:
            assert isinstance(row, GenerationSequence)
            chunks.append(Chunk(row.token_ids[-1:], row.cache, row.variant, True))
        left += bool(prefill) - len(decode)
        if prefill:
            prefill.sort(key=lambda row: self._tokens.served(row.user))  # stable: a user's oldest first
        rows = decode
        for row in prefill:
            if left <= 0:
                break
            ids = row.prompt_ids[row.prefilled : row.prefilled + left]
            left -= len(ids)
            last = row.hidden is None and row.prefilled + len(ids) == len(row.prompt_ids)
            chunks.append(Chunk(ids, row.cache, row.variant, last, row.hidden))
            rows.append(row)
        return rows, chunks

    def _choose(
        self, logits: Any, wanted: list[GenerationSequence], masks: Future[dict[int, Any]] | None
    ) -> list[SampledToken | GymError]:
        """A sampled token or a ``GymError`` for each row."""
        banned = {} if masks is None else masks.result()
        errors = {place: mask for place, mask in banned.items() if isinstance(mask, GymError)}
        rows = [
            Row(row.sampler, None if place in errors else banned.get(place))
            for place, row in enumerate(wanted)
        ]
        chosen = choose(logits, rows, self._decoder.token)
        return [errors.get(place) or sampled.error or sampled for place, sampled in enumerate(chosen)]

    def _push(self, row: GenerationSequence, sampled: SampledToken | GymError) -> None:
        now = time.monotonic()
        counters = self._counters
        if isinstance(sampled, GymError):
            self._fail(row, sampled)
            return
        if row.token_ids:
            counters.per_token.add(now - row.last_token_at)
        else:
            counters.first_token.add(now - row.submitted)
        row.last_token_at = now
        counters.generated_tokens += 1
        self._tokens.charge(row.user, ANSWER_WEIGHT)
        try:
            reason = row.push(sampled, now)
            if reason is not None:
                self._end(row, reason)
                row.deliver()
        except GymError as error:
            self._fail(row, error)
        except Exception as failure:  # noqa: BLE001 - logged; it fails this request alone
            self._report_failure(row, failure)

    def _settle(self, row: EmbeddingSequence) -> None:
        try:
            self._end(row, None)
            row.deliver()
            self._counters.embeddings += 1
        except Exception as failure:  # noqa: BLE001 - logged; it fails this request alone
            self._report_failure(row, failure)

    # The end of a request.

    def _fail(self, request: ScheduledRequest, error: GymError) -> None:
        try:
            self._end(request, "error")
        except Exception:
            log.exception("a request could not be ended")
        finally:
            request.fail(error)

    def _report_failure(self, request: ScheduledRequest, failure: Exception) -> None:
        log.exception("a request failed")
        self._fail(request, _internal("the request", failure))

    def _end(self, request: ScheduledRequest, reason: str | None) -> None:
        """Free its place and its variant, before the caller gets the result."""
        if request.ended:
            return
        request.ended = True
        counters = self._counters
        if reason is not None:
            counters.finished[reason] += 1
        if request.cache is not None:
            self._running.remove(request)
            self._tokens.running[request.user] -= 1
            counters.kv_bytes_reserved -= request.kv_bytes
            counters.kv_tokens -= request.length
            counters.served(request.started)
            request.cache = None
            variant, request.variant = request.variant, None
            self._release(variant)
        else:
            self._waiting.remove(request)
        self._tokens.leave(request.user)


def _internal(what: str, error: Exception) -> GymError:
    return GymError(ErrorCode.INTERNAL, f"{what} failed: {error!r}", "the log has the trace; try again")
