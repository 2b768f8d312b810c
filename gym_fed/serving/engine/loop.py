"""Run the engine's loop: admit requests, run a forward pass for all of them, and sample tokens for those in decode.

The loop runs in one thread. ``admission`` decides which requests run, and ``scheduler`` what each computes in a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.admission import AdmissionQueue, KVCacheManager
from gym_fed.serving.engine.guided import banned_by
from gym_fed.serving.engine.sampling import Row, SampledToken, choose
from gym_fed.serving.engine.scheduler import ANSWER_WEIGHT, ScheduledStep, Scheduler, TokenCounters
from gym_fed.serving.engine.sequence import EmbeddingSequence, GenerationSequence, ScheduledRequest

if TYPE_CHECKING:
    from gym_fed.config.serving import EngineConfig
    from gym_fed.serving.engine.draft_model import DraftModel
    from gym_fed.serving.engine.stats import Counters
    from gym_fed.serving.forward.chunk import Chunk
    from gym_fed.serving.forward.kv_cache import KVPool
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.variant_weights import VariantSource


log = logging.getLogger("gym_fed")

_BROKEN = 3
"""Consecutive failed steps after which the engine is unhealthy."""


class EngineLoop:
    """The waiting and the running requests, and the step that advances them."""

    def __init__(
        self,
        served: MultiVariantModel,
        pool: KVPool,
        source: VariantSource | None,
        config: EngineConfig,
        counters: Counters,
        draft: DraftModel | None = None,
    ) -> None:
        self._model, self._draft = served, draft
        self._runner = ModelRunner(served, counters)
        self._config = config
        self._counters = counters
        self._tokens = TokenCounters()
        self._kv = KVCacheManager(pool, prefix_cache=config.prefix_cache)
        self._admission = AdmissionQueue(self._tokens, source, self._kv, self._fail, served.vocabulary)
        self._scheduler = Scheduler(
            config, self._tokens, self._preempt, whole_prompts=served.whole_prompts, draft=draft
        )
        self._guides = ThreadPoolExecutor(1, thread_name_prefix="gym-fed-guide")

    # For any thread.

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._admission.waiting)

    def waiting_of(self, user: str) -> int:
        return self._admission.waiting.count(user)

    @property
    def healthy(self) -> bool:
        return self._counters.failed_in_a_row < _BROKEN

    # For the engine's thread.

    @property
    def idle(self) -> bool:
        """True if no request is running or waiting."""
        return not self.running and not self.waiting

    def put(self, request: ScheduledRequest) -> None:
        """Append a new request to its user's queue."""
        self._admission.put(request)

    def release_variants(self) -> None:
        """Drop the references to the variants of the last step, and the draft's KV caches; called when idle."""
        self._model.release_variants()
        if self._draft is not None:
            self._draft.release()

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
        """Admit requests, and run one forward pass; return False if nothing ran."""
        started = time.monotonic()
        for request in self._admission.admit(self._config.max_concurrent - self.running):
            assert request.cache is not None
            self._counters.cached_tokens += request.cache.length
            self._scheduler.running.append(request)
        if not self.running:
            return False
        self._run_step(self._scheduler.schedule())
        self._counters.busy_seconds += time.monotonic() - started
        return True

    def end_all(self, arrived: list[ScheduledRequest], error: GymError | None) -> None:
        """Cancel or fail every request, including those in ``arrived``; no step may follow.

        Every caller gets a reply even if ending a request fails.
        """
        for request in [*self._scheduler.running, *self._admission.waiting, *arrived]:
            if error is None:
                self.cancel(request)
            else:
                self._fail(request, error)
        self._guides.shutdown()
        if self._draft is not None:
            self._draft.release()

    # The parts of a step.

    def _run_step(self, step: ScheduledStep) -> None:
        sampled_rows = [
            (row, chunk)
            for row, chunk in zip(step.rows, step.chunks, strict=True)
            if chunk.wants_logits and isinstance(row, GenerationSequence)
        ]
        # Computed in parallel with the forward pass, which releases the GIL
        masks: Future[dict[int, Any]] | None = None
        guides = {place: row.guide for place, (row, _) in enumerate(sampled_rows) if row.guide is not None}
        if guides:
            masks = self._guides.submit(banned_by, guides)
        counters = self._counters
        started = time.monotonic()
        logits, failures = self._runner.forward(step.chunks)
        counters.model_seconds += time.monotonic() - started
        counters.steps += 1
        counters.rows += len(step.rows)
        for place, (row, chunk) in enumerate(zip(step.rows, step.chunks, strict=True)):
            if place in failures:
                self._fail(row, failures[place])
                continue
            counters.rows_with_variants += row.variant is not None
            if place >= step.decode_rows:
                counters.prompt_tokens += len(chunk.token_ids)
                if not row.remaining:
                    self._kv.share(row)
            if isinstance(row, EmbeddingSequence) and not row.remaining:
                self._settle(row)
        if logits is not None:
            banned = {} if masks is None else masks.result()
            verified = sample_step(logits, sampled_rows, banned, self._push)
            counters.proposed_tokens += verified[0]
            counters.accepted_tokens += verified[1]
        if not failures:
            self._scheduler.cost.observe(step.decode_tokens, step.prefill_tokens, time.monotonic() - started)
        counters.kv_bytes_used = self._kv.bytes_used

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

    # The end and the preemption of requests.

    def _preempt(self, request: ScheduledRequest) -> None:
        self._counters.preemptions += 1
        self._stop(request)
        request.restart()
        self._admission.put_back(request)

    def _stop(self, request: ScheduledRequest) -> None:
        self._scheduler.running.remove(request)
        self._tokens.running[request.user] -= 1
        self._kv.free(request)
        self._counters.kv_bytes_used = self._kv.bytes_used

    def _fail(self, request: ScheduledRequest, error: GymError) -> None:
        try:
            self._end(request, "error")
        except Exception:
            log.exception("a request could not be ended")
        finally:
            request.fail(error)

    def _report_failure(self, request: ScheduledRequest, failure: Exception) -> None:
        log.exception("a request failed")
        self._fail(request, internal_error("the request", failure))

    def _end(self, request: ScheduledRequest, reason: str | None) -> None:
        """Free a request's slot and variant before the caller receives the result."""
        if request.ended:
            return
        request.ended = True
        counters = self._counters
        if reason is not None:
            counters.finished[reason] += 1
        if request.cache is not None:
            if reason != "error":
                self._kv.share(request)
            self._stop(request)
            counters.served(request.started)
        else:
            self._admission.waiting.remove(request)
        self._admission.release(request)
        self._tokens.leave(request.user)


class ModelRunner:
    """Runs the forward passes of one model.

    Args:
        model: The base, ready for multi-variant steps.
        counters: The counters of the engine, for failed steps.
    """

    def __init__(self, model: MultiVariantModel, counters: Counters) -> None:
        self._model = model
        self._counters = counters

    def forward(self, chunks: list[Chunk]) -> tuple[Any, dict[int, GymError]]:
        """Compute the logits of chunks, and the errors of failed chunks by index (their logits are 0).

        A failed step leaves the caches unchanged, so each chunk is then tried alone, and only chunks that fail again
        are reported.
        """
        counters = self._counters
        try:
            logits = self._model.step(chunks)
        except Exception as error:
            if len(chunks) > 1:
                log.warning("a step of %d requests failed (%r); each is retried alone", len(chunks), error)
                return self._forward_alone(chunks)
            counters.failed_steps += 1
            counters.failed_in_a_row += 1
            if isinstance(error, GymError):
                return None, {0: error}
            log.exception("a step failed")
            return None, {0: internal_error("the step", error)}
        counters.failed_in_a_row = 0
        return logits, {}

    def _forward_alone(self, chunks: list[Chunk]) -> tuple[Any, dict[int, GymError]]:
        parts: list[Any] = []
        failures: dict[int, GymError] = {}
        for place, chunk in enumerate(chunks):
            logits, failed = self.forward([chunk])
            failures.update((place, error) for error in failed.values())
            parts.append(logits)
        alike = next((part for part in parts if part is not None and len(part)), None)
        if alike is None:
            return None, failures
        return torch.cat(
            [
                alike.new_zeros(chunk.rows, alike.shape[1]) if part is None else part
                for chunk, part in zip(chunks, parts, strict=True)
            ]
        ), failures


def internal_error(subject: str, error: Exception) -> GymError:
    """Return the error for an unexpected exception, which the caller must log."""
    return GymError(
        ErrorCode.INTERNAL, f"{subject} failed: {error!r}", "the log has the traceback; try again"
    )


@dataclass
class _VerifiedRow:
    sequence: GenerationSequence
    proposal: list[int]
    first: int
    """The index of the first row of its logits."""


def sample_step(
    logits: Any,
    wanted: Sequence[tuple[GenerationSequence, Chunk]],
    banned: dict[int, Any],
    push: Callable[[GenerationSequence, SampledToken | GymError], None],
) -> tuple[int, int]:
    """Sample the tokens of a step.

    Args:
        logits: ``[rows, vocab] float32``: the ``Chunk.rows`` of every chunk, in order.
        wanted: Sequences and their chunks; the last tokens of a chunk are proposals if ``num_logits`` is more than 1.
        banned: The tokens that guides forbid, by index in ``wanted``.
        push: Called with a sequence's next token, or the error that replaces it.

    Returns:
        The number of proposed tokens, and how many of them were sampled.
    """
    active: list[_VerifiedRow] = []
    start = proposed = correct = accepted = 0
    for sequence, chunk in wanted:
        active.append(_VerifiedRow(sequence, chunk.token_ids[len(chunk.token_ids) - chunk.rows + 1 :], start))
        start += chunk.rows
    while active:
        places = [row.first + accepted for row in active]
        sampled_tokens = _choose(logits if len(places) == len(logits) else logits[places], active, banned)
        going: list[_VerifiedRow] = []
        for row, sampled in zip(active, sampled_tokens, strict=True):
            sequence = row.sequence
            if sequence.ended:
                continue
            push(sequence, sampled)
            right = isinstance(sampled, SampledToken) and [sampled.token_id] == row.proposal[accepted:][:1]
            if right and not sequence.ended:
                going.append(row)
            elif row.proposal:
                sequence.verified(len(row.proposal), accepted + right)
                proposed += len(row.proposal)
                correct += accepted + right
        active = going
        accepted += 1
        banned = banned_by(
            {n: r.sequence.guide for n, r in enumerate(active) if r.sequence.guide is not None}
        )
    return proposed, correct


def _choose(logits: Any, rows: list[_VerifiedRow], banned: dict[int, Any]) -> list[SampledToken | GymError]:
    """Sample a token, or return a ``GymError``, for each row."""
    errors = {place: mask for place, mask in banned.items() if isinstance(mask, GymError)}
    samplers = [
        Row(row.sequence.sampler, None if n in errors else banned.get(n)) for n, row in enumerate(rows)
    ]
    sizes = [row.sequence.vocab_size for row in rows]
    chosen: dict[int, SampledToken] = {}
    for size in dict.fromkeys(sizes):  # a row's random numbers depend on the size of its own vocabulary
        places = [place for place, own in enumerate(sizes) if own == size]
        part = logits if len(places) == len(rows) else logits[places]
        chosen.update(zip(places, choose(part[:, :size], [samplers[place] for place in places]), strict=True))
    return [errors.get(place) or chosen[place].error or chosen[place] for place in range(len(rows))]
