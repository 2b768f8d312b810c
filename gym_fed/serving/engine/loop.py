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
from gym_fed.serving.engine.fair_queue import ANSWER_WEIGHT, PROMPT_WEIGHT, FairQueue, Shares
from gym_fed.serving.engine.guided import banned_by
from gym_fed.serving.engine.sampling import Choice, Row, choose
from gym_fed.serving.engine.sequence import Embedding, Sequence, Work
from gym_fed.serving.engine.stats import Counters
from gym_fed.serving.forward.loaded import LoadedVariant, VariantSource
from gym_fed.serving.forward.multi_variant import Piece

if TYPE_CHECKING:
    from gym_fed.serving.engine.detokenizing import TextDecoder
    from gym_fed.serving.forward.multi_variant import MixedModel

log = logging.getLogger("gym_fed")

_ON_THEIR_WAY = 64
"""Variants that are asked for at once; more would push one another out of memory again."""

_PATIENCE_SECONDS = 5.0
"""So long others may pass a variant that has no room in memory because theirs are in use. Then no other request with a
variant is let in until it has, or it might wait for ever. One that takes long to load is passed all the while."""

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
        self._waiting = FairQueue(self._shares)
        self._running: list[Work] = []
        self._guides = ThreadPoolExecutor(1, thread_name_prefix="gym-fed-guide")

    # What other threads may ask.

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

    # The loop's own.

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done until something is submitted."""
        return not self._running and not self.waiting

    def put(self, work: Work) -> None:
        """New work, at the end of its user's queue."""
        self._shares.arrive(work.user)
        self._waiting.put(work)

    def rest(self) -> None:
        """Nothing came for a while: what the last step needed need not stay in memory."""
        self._mixed.rest()

    def cancel(self, work: Work) -> None:
        """End one, waiting or running."""
        if work.ended:
            return
        try:
            self._end(work, "cancelled")
            work.call_off()
        except Exception as failure:  # noqa: BLE001 - logged; it fails this request alone
            self._tell_failure(work, failure)

    def turn(self) -> bool:
        """Everything that can be done at once; whether anything was."""
        started = time.monotonic()
        self._admit()
        if not self._running:
            return False
        self._step()
        self._counters.busy_seconds += time.monotonic() - started
        return True

    def end_all(self, arrived: list[Work], error: GymError | None) -> None:
        """Cancel everything, or fail it, with what had not been taken over yet; no more turns after this.

        Whatever breaks on the way, nobody is left waiting.
        """
        for work in [*self._running, *self._waiting, *arrived]:
            if error is None:
                self.cancel(work)
            else:
                self._fail(work, error)
        self._guides.shutdown()

    # Admission.

    def _admit(self) -> None:
        absent: dict[str, bool] = {}
        while len(self._running) < self._config.max_concurrent and len(self._waiting):
            if not self._admit_next(absent):
                return

    def _admit_next(self, absent: dict[str, bool]) -> bool:
        """Let the next one in whose variant is in memory; not past one that waits for room in the KV cache."""
        makes_room = False
        for work in self._waiting.in_turn():
            if makes_room and work.variant_name is not None:
                continue
            try:
                ready, variant = self._variant(work.variant_name, absent)
            except GymError as error:
                self._fail(work, error)
                continue
            if not ready:
                makes_room = makes_room or self._has_waited(work, absent)
                continue
            reserved = self._counters.kv_bytes_reserved
            if reserved + work.kv_bytes > self._config.kv_cache_size:
                self._release(variant)
                return False
            work.variant = variant
            work.cache = self._mixed.new_cache(work.cache_tokens)
            work.started = time.monotonic()
            self._counters.kv_bytes_reserved += work.kv_bytes
            self._shares.running[work.user] += 1
            self._shares.charge(work.user, PROMPT_WEIGHT * len(work.prompt_ids))
            self._running.append(work)
            self._waiting.remove(work)
            return True
        return False

    def _has_waited(self, work: Work, absent: dict[str, bool]) -> bool:
        """Whether there has been no room for its variant for so long that others must make some."""
        if work.variant_name is None or not absent.get(work.variant_name, False):
            work.passed = 0.0
            return False
        now = time.monotonic()
        work.passed = work.passed or now
        return now - work.passed > _PATIENCE_SECONDS

    def _variant(self, name: str | None, absent: dict[str, bool]) -> tuple[bool, LoadedVariant | None]:
        """Whether it is in memory, and itself, pinned. ``absent`` are those that are not, in this turn.

        Their values: whether there is no room for them.
        """
        if name is None:
            return True, None
        if name in absent or len(absent) >= _ON_THEIR_WAY:
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
        """Unpin it. That a source breaks over this is no fault of those whose answers are being written."""
        if variant is None or self._source is None:
            return
        try:
            self._source.release(variant)
        except Exception:
            log.exception("variant %s could not be released", variant.name)

    # One step.

    def _step(self) -> None:
        rows, pieces = self._plan()
        wanted = [
            row
            for row, piece in zip(rows, pieces, strict=True)
            if piece.wants_logits and isinstance(row, Sequence)
        ]
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
            if row.read < len(row.prompt_ids):
                row.read += len(piece.token_ids)
                counters.prompt_tokens += len(piece.token_ids)
            if isinstance(row, Embedding) and row.read == len(row.prompt_ids):
                self._settle(row)
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

    def _plan(self) -> tuple[list[Work], list[Piece]]:
        """Who is in the step, and with what: those who write first, then prompts, the least served user's before."""
        writing: list[Work] = []
        reading: list[Work] = []
        pieces: list[Piece] = []
        for row in self._running:
            (writing if isinstance(row, Sequence) and row.writes else reading).append(row)
        left = self._config.max_batch_tokens - bool(reading)  # a token for prompts there always is
        if len(writing) > left:  # more than a step takes: in turns
            writing, late = writing[:left], writing[left:]
            self._running = [*late, *reading, *writing]
        for row in writing:
            assert isinstance(row, Sequence)
            pieces.append(Piece(row.token_ids[-1:], row.cache, row.variant, True))
        left += bool(reading) - len(writing)
        if reading:
            reading.sort(key=lambda row: self._shares.served(row.user))  # stable: a user's oldest first
        for row in reading:
            if left <= 0:
                break
            ids = row.prompt_ids[row.read : row.read + left]
            left -= len(ids)
            last = row.hidden is None and row.read + len(ids) == len(row.prompt_ids)
            pieces.append(Piece(ids, row.cache, row.variant, last, row.hidden))
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
            if reason is not None:
                self._end(row, reason)
                row.deliver()
        except GymError as error:
            self._fail(row, error)
        except Exception as failure:  # noqa: BLE001 - logged; it fails this request alone
            self._tell_failure(row, failure)

    def _settle(self, row: Embedding) -> None:
        try:
            self._end(row, None)
            row.deliver()
            self._counters.embeddings += 1
        except Exception as failure:  # noqa: BLE001 - logged; it fails this request alone
            self._tell_failure(row, failure)

    # The end of one.

    def _fail(self, work: Work, error: GymError) -> None:
        try:
            self._end(work, "error")
        except Exception:
            log.exception("a request could not be ended")
        finally:
            work.fail(error)

    def _tell_failure(self, work: Work, failure: Exception) -> None:
        log.exception("a request failed")
        self._fail(work, _internal("the request", failure))

    def _end(self, work: Work, reason: str | None) -> None:
        """Free its place and its variant, before who waits for it is told."""
        if work.ended:
            return
        work.ended = True
        counters = self._counters
        if reason is not None:
            counters.finished[reason] += 1
        if work.cache is not None:
            self._running.remove(work)
            self._shares.running[work.user] -= 1
            counters.kv_bytes_reserved -= work.kv_bytes
            counters.kv_tokens -= work.length
            counters.served(work.started)
            work.cache = None
            variant, work.variant = work.variant, None
            self._release(variant)
        else:
            self._waiting.remove(work)
        self._shares.leave(work.user)


def _internal(what: str, error: Exception) -> GymError:
    return GymError(ErrorCode.INTERNAL, f"{what} failed: {error!r}", "the log has the trace; try again")
