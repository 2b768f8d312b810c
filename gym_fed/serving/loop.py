"""The engine's turn: admit who is next, one forward for all who run, one token for each whose prompt is read.

One thread runs it. A step has one token of every request that writes, and pieces of prompts in what
``max_batch_tokens`` leaves, so that a long prompt is read beside answers and does not stop them.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.config.serving import EngineConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.engine_stats import Counters
from gym_fed.serving.fair_queue import ANSWER_WEIGHT, PROMPT_WEIGHT, FairQueue, Shares
from gym_fed.serving.guided import banned_by
from gym_fed.serving.loaded import LoadedVariant, VariantSource
from gym_fed.serving.mixed import Piece
from gym_fed.serving.sampling import Choice, Row, choose
from gym_fed.serving.sequence import Embedding, Sequence

if TYPE_CHECKING:
    from gym_fed.serving.detokenizing import TextDecoder
    from gym_fed.serving.mixed import MixedModel

log = logging.getLogger("gym_fed")

_ON_THEIR_WAY = 64
"""Variants that are asked for at once; more would push one another out of memory again."""

_PATIENCE_SECONDS = 5.0
"""A variant that is not in memory so long after its turn came has no room there: others' are in use. Until it has, no
other request with a variant is let in, or it might wait for ever."""

_BROKEN = 3
"""Steps that fail one after the other before the engine calls itself unhealthy."""


class EngineLoop:
    """What waits and what runs. What others may read comes first."""

    def __init__(
        self,
        mixed: MixedModel,
        decoder: TextDecoder,
        source: VariantSource | None,
        config: EngineConfig,
        counters: Counters,
    ) -> None:
        self._mixed = mixed
        self._decoder = decoder
        self._source = source
        self._config = config
        self._counters = counters
        self._shares = Shares()
        self._waiting: FairQueue[Sequence] = FairQueue(self._shares)
        self._embeddings: FairQueue[Embedding] = FairQueue(self._shares)
        self._running: list[Sequence] = []
        self._guides = ThreadPoolExecutor(1, thread_name_prefix="gym-fed-guide")

    # What other threads may ask.

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._embeddings)

    def waiting_of(self, user: str) -> int:
        return self._waiting.count(user) + self._embeddings.count(user)

    @property
    def healthy(self) -> bool:
        return self._counters.failed_in_a_row < _BROKEN

    # The loop's own.

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done until something is submitted."""
        return not self._running and not self.waiting

    def put(self, work: Sequence | Embedding) -> None:
        """New work, at the end of its user's queue."""
        self._shares.arrive(work.user)
        if isinstance(work, Sequence):
            self._waiting.put(work)
        else:
            self._embeddings.put(work)

    def cancel(self, work: Sequence | Embedding) -> None:
        """End one, waiting or running."""
        if isinstance(work, Embedding):
            if self._embeddings.remove(work):
                self._shares.leave(work.user)
        elif not work.ended:
            self._end(work, work.finish("cancelled"))
            work.deliver()

    def turn(self) -> bool:
        """Everything that can be done at once; whether anything was."""
        started = time.monotonic()
        self._admit()
        worked = self._embed()
        if self._running:
            self._step()
            worked = True
        if worked:
            self._counters.busy_seconds += time.monotonic() - started
        return worked

    def end_all(self, arrived: list[Sequence | Embedding], error: GymError | None) -> None:
        """Cancel everything, or fail it, with what had not been taken over yet; no more turns after this."""
        why = error or GymError(ErrorCode.UNAVAILABLE, "the engine was closed")
        for work in [*self._running, *self._waiting, *self._embeddings, *arrived]:
            if isinstance(work, Embedding):
                self._embeddings.remove(work)
                if work.future.set_running_or_notify_cancel():
                    work.future.set_exception(why)
            elif error is None:
                self.cancel(work)
            else:
                self._fail(work, error)
        self._guides.shutdown()

    # Admission.

    def _admit(self) -> None:
        absent: set[str] = set()
        while len(self._running) < self._config.max_concurrent and len(self._waiting):
            if not self._admit_next(absent):
                return

    def _admit_next(self, absent: set[str]) -> bool:
        """Let the next one in whose variant is in memory; not past one that waits for room in the KV cache."""
        makes_room = False
        for sequence in self._waiting.in_turn():
            if makes_room and sequence.variant_name is not None:
                continue
            try:
                ready, variant = self._variant(sequence.variant_name, absent)
            except GymError as error:
                self._fail(sequence, error)
                continue
            if not ready:
                now = time.monotonic()
                sequence.passed = sequence.passed or now
                makes_room = makes_room or now - sequence.passed > _PATIENCE_SECONDS
                continue
            reserved = self._counters.kv_bytes_reserved
            if reserved + sequence.kv_bytes > self._config.kv_cache_size:
                self._release(variant)
                return False
            sequence.variant = variant
            sequence.cache = self._mixed.new_cache(len(sequence.prompt_ids) + sequence.max_tokens)
            sequence.started = time.monotonic()
            self._counters.kv_bytes_reserved += sequence.kv_bytes
            self._shares.running[sequence.user] += 1
            self._shares.charge(sequence.user, PROMPT_WEIGHT * len(sequence.prompt_ids))
            self._running.append(sequence)
            self._waiting.remove(sequence)
            return True
        return False

    def _variant(self, name: str | None, absent: set[str]) -> tuple[bool, LoadedVariant | None]:
        """Whether it is in memory, and itself, pinned. ``absent`` are those that are not, in this turn."""
        if name is None:
            return True, None
        if name in absent or len(absent) >= _ON_THEIR_WAY:
            return False, None
        assert self._source is not None  # submission refuses variants without a source
        try:
            variant = self._source.poll(name)
        except GymError:
            raise
        except Exception as error:
            log.exception("variant %s could not be loaded", name)
            raise GymError(
                ErrorCode.INTERNAL, f"variant {name} could not be loaded: {error!r}", "the log has the trace"
            ) from error
        if variant is None:
            absent.add(name)
        return variant is not None, variant

    def _release(self, variant: LoadedVariant | None) -> None:
        if variant is not None and self._source is not None:
            self._source.release(variant)

    # Embeddings.

    def _embed(self) -> bool:
        """One, if there is one whose variant is in memory."""
        absent: set[str] = set()
        for embedding in self._embeddings.in_turn():
            error, ready, variant = None, True, None
            if not embedding.future.cancelled():
                try:
                    ready, variant = self._variant(embedding.variant_name, absent)
                except GymError as refusal:
                    error = refusal
            if not ready:
                continue
            self._embeddings.remove(embedding)
            self._shares.leave(embedding.user)
            try:
                if embedding.future.set_running_or_notify_cancel():
                    self._settle(embedding, variant, error)
            finally:
                self._release(variant)
            return True
        return False

    def _settle(self, embedding: Embedding, variant: LoadedVariant | None, error: GymError | None) -> None:
        """Compute it, or tell why not; nobody can cancel it any more."""
        if error is None:
            try:
                vector = self._mixed.embed(embedding.prompt_ids, variant)
            except GymError as refusal:
                error = refusal
            except Exception as failure:
                log.exception("an embedding failed")
                error = _internal("the embedding", failure)
        if error is not None:
            embedding.future.set_exception(error)
            return
        self._counters.embeddings += 1
        self._counters.prompt_tokens += len(embedding.prompt_ids)
        self._shares.charge(embedding.user, PROMPT_WEIGHT * len(embedding.prompt_ids))
        embedding.future.set_result(vector)

    # One step.

    def _step(self) -> None:
        rows, pieces = self._plan()
        wanted = [row for row, piece in zip(rows, pieces, strict=True) if piece.wants_logits]
        masks: Future[dict[int, Any]] | None = None  # made beside the model, which lets go of Python's lock
        guides = {place: row.guide for place, row in enumerate(wanted) if row.guide is not None}
        if guides:
            masks = self._guides.submit(banned_by, guides)
        counters = self._counters
        started = time.monotonic()
        logits, failures = self._forward(pieces)
        counters.model_seconds += time.monotonic() - started
        counters.steps += 1
        counters.rows += len(rows)
        for place, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            if place in failures:
                self._fail(row, failures[place])
                continue
            counters.kv_tokens += len(piece.token_ids)
            counters.rows_with_variants += row.variant is not None
            if not row.writes:
                row.read += len(piece.token_ids)
                counters.prompt_tokens += len(piece.token_ids)
        if logits is None:
            return
        for row, choice in zip(wanted, self._choose(logits, wanted, masks), strict=True):
            if not row.ended:
                self._push(row, choice)

    def _forward(self, pieces: list[Piece]) -> tuple[Any, dict[int, GymError]]:
        """Logits of the pieces that want some, and the errors of those that failed, by place (their logits are 0).

        Caches are as before when a step fails, so each piece is then tried alone: only who is at fault fails.
        """
        counters = self._counters
        try:
            logits = self._mixed.step(pieces)
        except Exception as error:
            if len(pieces) > 1:
                log.warning("a step of %d requests failed (%r); each is tried alone", len(pieces), error)
                return self._forward_alone(pieces)
            counters.failed_steps += 1
            counters.failed_in_a_row += 1
            if isinstance(error, GymError):
                return None, {0: error}
            log.exception("a step failed")
            return None, {0: _internal("the step", error)}
        counters.failed_in_a_row = 0
        return logits, {}

    def _forward_alone(self, pieces: list[Piece]) -> tuple[Any, dict[int, GymError]]:
        found: list[Any] = []
        failures: dict[int, GymError] = {}
        for place, piece in enumerate(pieces):
            logits, failed = self._forward([piece])
            failures.update((place, error) for error in failed.values())
            if piece.wants_logits:
                found.append(logits)
        alike = next((logits for logits in found if logits is not None), None)
        if alike is None:
            return None, failures
        return torch.cat([alike.new_zeros(alike.shape) if one is None else one for one in found]), failures

    def _plan(self) -> tuple[list[Sequence], list[Piece]]:
        """Who is in the step, and with what: those who write first, then prompts, the least served user's before."""
        writing = [row for row in self._running if row.writes]
        reading = [row for row in self._running if not row.writes]
        left = self._config.max_batch_tokens - bool(reading)  # a token for prompts there always is
        if len(writing) > left:  # more than a step takes: in turns
            writing, late = writing[:left], writing[left:]
            self._running = [*late, *reading, *writing]
        pieces = [Piece(row.token_ids[-1:], row.cache, row.variant, True) for row in writing]
        left += bool(reading) - len(writing)
        if reading:
            reading.sort(key=lambda row: self._shares.served(row.user))  # stable: a user's oldest first
        for row in reading:
            if left <= 0:
                break
            ids = row.prompt_ids[row.read : row.read + left]
            left -= len(ids)
            last = row.read + len(ids) == len(row.prompt_ids)
            pieces.append(Piece(ids, row.cache, row.variant, last))
            writing.append(row)
        return writing, pieces

    def _choose(
        self, logits: Any, wanted: list[Sequence], masks: Future[dict[int, Any]] | None
    ) -> list[Choice | GymError]:
        """A choice or a ``GymError`` for each row."""
        banned = {} if masks is None else masks.result()
        errors = {place: mask for place, mask in banned.items() if isinstance(mask, GymError)}
        rows = [
            Row(row.sampler, None if place in errors else banned.get(place))
            for place, row in enumerate(wanted)
        ]
        chosen = choose(logits, rows, self._decoder.token)
        return [errors.get(place) or choice.error or choice for place, choice in enumerate(chosen)]

    def _push(self, row: Sequence, choice: Choice | GymError) -> None:
        now = time.monotonic()
        counters = self._counters
        if isinstance(choice, GymError):
            self._fail(row, choice)
            return
        if row.token_ids:
            counters.per_token.add(now - row.last_token_at)
        else:
            counters.first_token.add(now - row.submitted)
        row.last_token_at = now
        counters.generated_tokens += 1
        self._shares.charge(row.user, ANSWER_WEIGHT)
        try:
            reason = row.push(choice, now)
        except GymError as error:
            self._fail(row, error)
            return
        if reason is not None:
            self._end(row, reason)
            row.deliver()

    # The end of one.

    def _fail(self, sequence: Sequence, error: GymError) -> None:
        self._end(sequence, "error")
        sequence.generation._fail(error)

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.ended = True
        counters = self._counters
        counters.finished[reason] += 1
        if sequence.cache is not None:
            self._running.remove(sequence)
            self._shares.running[sequence.user] -= 1
            counters.kv_bytes_reserved -= sequence.kv_bytes
            counters.kv_tokens -= sequence.length
            counters.served(sequence.started)
            sequence.cache = None
            variant, sequence.variant = sequence.variant, None
            self._release(variant)
        else:
            self._waiting.remove(sequence)
        self._shares.leave(sequence.user)


def _internal(what: str, error: Exception) -> GymError:
    return GymError(ErrorCode.INTERNAL, f"{what} failed: {error!r}", "the log has the trace; try again")
