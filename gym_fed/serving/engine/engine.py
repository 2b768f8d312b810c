"""Continuous batching of requests for different variants of one base: submit from any thread, stream the tokens.

    with Engine(MultiVariantModel(model), tokenizer, store) as engine:
        for event in engine.submit(GenerationRequest(ids, variant="alice")):
            print(event.text, end="")

When a step raises, each of its requests is tried alone. Those that raise again fail (``INTERNAL``; the log has the
trace) and the engine continues. After three consecutive failures ``healthy`` is False until a step succeeds. If the
loop itself breaks, all requests fail and new ones are refused.

A request holds the KV blocks of its tokens so far. When none is left for a running answer, another one is preempted and
its tokens are computed again later. Only a request that would not fit alone is refused.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.config.serving import EngineConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.engine.generation import Generation, PendingEmbedding
from gym_fed.serving.engine.loop import EngineLoop
from gym_fed.serving.engine.request import GenerationRequest, Limits
from gym_fed.serving.engine.sequence import EmbeddingSequence, GenerationSequence, ScheduledRequest
from gym_fed.serving.engine.stats import Counters, EngineStats

if TYPE_CHECKING:
    from gym_fed.serving.engine.guided import GuideFactory
    from gym_fed.serving.forward.loaded import VariantSource
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

log = logging.getLogger("gym_fed")

_VARIANT_POLL_SECONDS = 0.001
_LONGEST_RETRY = 600
_IDLE_SECONDS = 1.0
"""After so long without requests the engine releases the last step's variants: the source decides which to keep."""


class Engine:
    """Runs requests until it is closed. Its own thread uses the model; nothing else may use it meanwhile.

    Args:
        served: The base, ready for multi-variant steps.
        tokenizer: Its tokenizer.
        source: Supplies variants; without one only the base is served.
        config: Limits.

    Raises:
        GymError: ``CONFIG_INVALID`` for a ``max_context`` beyond the model's own, and for a ``kv_cache_size`` of less
            than a block.
    """

    def __init__(
        self,
        served: MultiVariantModel,
        tokenizer: Any,
        source: VariantSource | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        pool = served.new_pool(self.config.kv_cache_size)
        self.limits = Limits(
            context=_context(served.model.config, self.config.max_context),
            vocab_size=served.vocabulary,
            kv_bytes_per_token=served.bytes_per_token,
            kv_bytes=pool.num_blocks * pool.block_bytes,
        )
        self.end_ids = end_ids(served.model, tokenizer)
        self._source = source
        self._tokenizer = tokenizer
        self._decoder = TextDecoder(tokenizer)
        self._guides: GuideFactory | None = None
        self._guides_lock = threading.Lock()
        self._counters = Counters()
        self._model = served
        self._loop = EngineLoop(served, pool, self._decoder, source, self.config, self._counters)
        self._changed = threading.Condition()
        self._arrived: list[ScheduledRequest] = []
        self._cancelled: list[ScheduledRequest] = []
        self._refused = 0
        self._closing = False
        self._broken: GymError | None = None
        self._thread = threading.Thread(target=self._run, name="gym-fed-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request.

        Raises:
            GymError: ``USAGE`` for an invalid parameter; ``TOO_LARGE`` for a prompt that does not fit;
                ``NOT_FOUND`` for an unknown variant; ``DATA_INVALID`` for a JSON schema that cannot be enforced;
                ``BUSY`` when too many wait, with the seconds in its hint; ``UNAVAILABLE`` after ``close``.
        """
        sequence = self._sequence(request)
        self._enqueue([sequence])
        return sequence.generation

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Queue requests of one user that enter the same step.

        An idle engine without ``step_stretch`` and ``prefix_cache`` makes the same batches of them in every run,
        whatever the time that anything takes.

        Raises:
            GymError: As ``submit``, with none of them queued.
        """
        sequences = [self._sequence(request) for request in requests]
        if sequences:
            self._enqueue(sequences)
        return [sequence.generation for sequence in sequences]

    def _sequence(self, request: GenerationRequest) -> GenerationSequence:
        params = request.sampling
        self.limits.check_prompt(request.prompt_ids)
        self.limits.check_sampling(params)
        max_tokens = self.limits.answer_tokens(request)
        self._require_room(request.user)  # before compiling a grammar and loading a variant
        guide = None if params.json_schema is None else self._guide_factory().guide(params.json_schema)
        self._prefetch(request.variant)
        own_ends = frozenset(params.stop_token_ids)
        generation = Generation(request)
        sequence = GenerationSequence(
            generation,
            self._decoder,
            max_tokens=max_tokens,
            end_ids=own_ends if params.ignore_eos else own_ends | self.end_ids,
            guide=guide,
            speculative_tokens=0 if self.config.speculative == "off" else self.config.speculative_tokens,
        )
        generation._on_cancel = partial(self._cancel, sequence)
        return sequence

    def embed(self, prompt_ids: list[int], variant: str | None = None, user: str = "") -> PendingEmbedding:
        """Queue the embedding of a text. It waits in the same queue as answers.

        Raises:
            GymError: As ``submit``.
        """
        self.limits.check_prompt(prompt_ids)
        self.limits.check_kv_cache(len(prompt_ids), 0)
        self._require_room(user)
        self._prefetch(variant)
        request = EmbeddingSequence(prompt_ids, variant, user, Future())
        self._enqueue([request])
        request.future.add_done_callback(lambda future: self._cancel(request) if future.cancelled() else None)
        return PendingEmbedding(request.future)

    @property
    def healthy(self) -> bool:
        """Whether the loop is alive and its last three steps did not all fail."""
        return self._thread.is_alive() and self._broken is None and not self._closing and self._loop.healthy

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        counters = self._counters
        return EngineStats(
            healthy=self.healthy,
            running=self._loop.running,
            queued=self._loop.waiting + len(self._arrived),
            finished=dict(counters.finished),
            refused=self._refused,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            embeddings=counters.embeddings,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            forwards=dict(self._model.forwards),
            rows=counters.rows,
            rows_with_variants=counters.rows_with_variants,
            sign_products=dict(self._model.sign_products),
            packed_products=dict(self._model.packed_products),
            busy_seconds=counters.busy_seconds,
            model_seconds=counters.model_seconds,
            preemptions=counters.preemptions,
            cached_tokens=counters.cached_tokens,
            proposed_tokens=counters.proposed_tokens,
            accepted_tokens=counters.accepted_tokens,
            kv_bytes_used=counters.kv_bytes_used,
            kv_bytes_limit=self.config.kv_cache_size,
            first_token=counters.first_token.snapshot(),
            per_token=counters.per_token.snapshot(),
        )

    def retry_after_seconds(self) -> int:
        """Expected wait of a new request: the mean time of the last answers divided by how many run at once."""
        seconds = self._counters.seconds_a_request()
        if seconds is None:
            return 1
        return min(_LONGEST_RETRY, max(1, math.ceil(seconds / max(1, self._loop.running))))

    def close(self) -> None:
        """Cancel all requests, release all variants, and wait for the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the caller's threads.

    def _prefetch(self, variant: str | None) -> None:
        if variant is None:
            return
        if self._source is None:
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {variant!r}: only the base is served here")
        self._source.prefetch(variant)

    def _guide_factory(self) -> GuideFactory:
        with self._guides_lock:
            if self._guides is None:
                from gym_fed.serving.engine.guided import GuideFactory

                self._guides = GuideFactory(self._tokenizer, self.limits.vocab_size, self.end_ids)
            return self._guides

    def _require_room(self, user: str) -> None:
        """Raises:
        GymError: ``BUSY`` or ``UNAVAILABLE``.
        """
        with self._changed:
            self._check_room(user)

    def _check_room(self, user: str, num_new: int = 1) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise GymError(ErrorCode.UNAVAILABLE, "the engine is closed", "start it again")
        free = max(0, self.config.max_concurrent - self._loop.running)
        waiting = self._loop.waiting + len(self._arrived)
        own = self._loop.waiting_of(user) + sum(request.user == user for request in self._arrived)
        for count, most, who in (
            (waiting, self.config.max_queued, "requests"),
            (own, self.config.max_queued_per_user, "requests of this user"),
        ):
            if count + num_new > most + free:
                self._refused += 1
                seconds = self.retry_after_seconds()
                raise GymError(
                    ErrorCode.BUSY, f"{count} {who} are waiting already", f"try again in {seconds} seconds"
                )

    def _enqueue(self, requests: Sequence[ScheduledRequest]) -> None:
        with self._changed:
            self._check_room(requests[0].user, len(requests))
            self._arrived += requests
            self._changed.notify_all()

    def _cancel(self, request: ScheduledRequest) -> None:
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify_all()

    # On the engine's thread.

    def _run(self) -> None:
        import torch

        error: GymError | None = None
        try:
            with torch.inference_mode():
                while self._take():
                    if not self._loop.step():
                        self._pause()
        except BaseException as broken:
            log.exception("the engine's loop broke")
            error = GymError(
                ErrorCode.INTERNAL, f"the engine broke: {broken!r}", "the log has the trace; start it again"
            )
        with self._changed:
            self._closing = True
            self._broken = error
            arrived, self._arrived = self._arrived, []
        self._loop.end_all(arrived, error)

    def _take(self) -> bool:
        """Take over new requests and cancellations, waiting for them when idle; False to end."""
        with self._changed:
            timeout: float | None = _IDLE_SECONDS
            while not (self._closing or self._arrived or self._cancelled) and self._loop.idle:
                if not self._changed.wait(timeout):
                    self._loop.release_variants()
                    timeout = None
            if self._closing:
                return False
            for request in self._arrived:
                self._loop.put(request)
            self._arrived.clear()
            cancelled, self._cancelled = self._cancelled, []
        for request in cancelled:
            self._loop.cancel(request)
        return True

    def _pause(self) -> None:
        """Every waiting request waits for its variant: wait a moment before the next step."""
        with self._changed:
            if not (self._closing or self._arrived or self._cancelled):
                self._changed.wait(_VARIANT_POLL_SECONDS)


def _context(config: Any, wanted: int | None) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = int(text.max_position_embeddings)
    if wanted is not None and wanted > limit:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"max_context: {wanted} is more than the model's {limit}",
            "leave it out",
        )
    return wanted or limit


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End tokens of generation_config.json, config.json and the tokenizer; each has an id, a list, or nothing."""
    found: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return frozenset(found)
