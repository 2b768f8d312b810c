"""Continuous batching of requests for different variants of one base: submit from any thread, read as tokens come.

    with Engine(MixedModel(model), tokenizer, store) as engine:
        for event in engine.submit(GenerationRequest(ids, variant="alice")):
            print(event.text, end="")

When a step raises, each of its requests is tried alone; those that raise again fail (``INTERNAL``; the log has the
trace) and the engine goes on. After three failures one after the other ``healthy`` is False until a step succeeds. If
the loop itself breaks, all requests fail and new ones are refused.

Each request reserves the KV cache of its prompt and ``max_tokens`` before it starts, so that memory cannot run out in
the middle of an answer. One without ``max_tokens`` reserves all that the context has left: ``max_context`` then decides
how many run at once.
"""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.config.serving import EngineConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.engine.generation import Generation, PendingEmbedding
from gym_fed.serving.engine.loop import EngineLoop
from gym_fed.serving.engine.request import GenerationRequest, Limits
from gym_fed.serving.engine.sequence import Embedding, Sequence, Work
from gym_fed.serving.engine.stats import Counters, EngineStats

if TYPE_CHECKING:
    from gym_fed.serving.engine.guided import GuideFactory
    from gym_fed.serving.forward.loaded import VariantSource
    from gym_fed.serving.forward.multi_variant import MixedModel

log = logging.getLogger("gym_fed")

_UNTIL_A_VARIANT_IS_HERE = 0.001
_LONGEST_RETRY = 600
_REST_SECONDS = 1.0
"""After so long without work nothing holds the last step's variants: the source alone decides which stay in memory."""


class Engine:
    """Runs requests until it is closed. One thread of its own has the model; nothing else may use it meanwhile.

    Args:
        mixed: The base, ready for mixed steps.
        tokenizer: Its tokenizer.
        source: Where variants come from; without one the base alone is served.
        config: Limits.

    Raises:
        GymError: ``CONFIG_INVALID`` for a ``max_context`` beyond the model's own.
    """

    def __init__(
        self,
        mixed: MixedModel,
        tokenizer: Any,
        source: VariantSource | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.limits = Limits(
            context=_context(mixed.model.config, self.config.max_context),
            vocab_size=mixed.vocabulary,
            kv_bytes_per_token=mixed.bytes_per_token,
            kv_bytes=self.config.kv_cache_size,
        )
        self.end_ids = _end_ids(mixed.model, tokenizer)
        self._source = source
        self._tokenizer = tokenizer
        self._decoder = TextDecoder(tokenizer)
        self._guides: GuideFactory | None = None
        self._guides_lock = threading.Lock()
        self._counters = Counters()
        self._model = mixed
        self._loop = EngineLoop(mixed, self._decoder, source, self.config, self._counters)
        self._changed = threading.Condition()
        self._arrived: list[Work] = []
        self._cancelled: list[Work] = []
        self._refused = 0
        self._closing = False
        self._broken: GymError | None = None
        self._thread = threading.Thread(target=self._run, name="gym-fed-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request.

        Raises:
            GymError: ``USAGE`` for a parameter that is off; ``TOO_LARGE`` for a prompt that does not fit;
                ``NOT_FOUND`` for an unknown variant; ``DATA_INVALID`` for a JSON schema that cannot be enforced;
                ``BUSY`` when too many wait, with the seconds in its hint; ``UNAVAILABLE`` after ``close``.
        """
        params = request.sampling
        self.limits.check_prompt(request.prompt_ids)
        self.limits.check_sampling(params)
        max_tokens = self.limits.answer_tokens(request)
        self._require_room(request.user)  # before the work of a grammar and a variant
        guide = None if params.json_schema is None else self._guide_factory().guide(params.json_schema)
        self._prefetch(request.variant)
        own_ends = frozenset(params.stop_token_ids)
        generation = Generation(request)
        sequence = Sequence(
            generation,
            self._decoder,
            max_tokens=max_tokens,
            kv_bytes=self.limits.kv_bytes_needed(len(request.prompt_ids), max_tokens),
            end_ids=own_ends if params.ignore_eos else own_ends | self.end_ids,
            guide=guide,
        )
        generation._call_off = partial(self._call_off, sequence)
        self._enqueue(sequence)
        return generation

    def embed(self, prompt_ids: list[int], variant: str | None = None, user: str = "") -> PendingEmbedding:
        """Queue a text that is wanted as a vector (``MixedModel.embed``). It waits its turn as answers do.

        Raises:
            GymError: As ``submit``.
        """
        self.limits.check_prompt(prompt_ids)
        kv_bytes = self.limits.kv_bytes_needed(len(prompt_ids), 0)
        self._require_room(user)
        self._prefetch(variant)
        work = Embedding(prompt_ids, variant, user, kv_bytes, Future())
        self._enqueue(work)
        work.future.add_done_callback(lambda future: self._call_off(work) if future.cancelled() else None)
        return PendingEmbedding(work.future)

    @property
    def healthy(self) -> bool:
        """Whether the loop is alive and its last three steps did not all fail."""
        return self._thread.is_alive() and self._broken is None and not self._closing and self._loop.healthy

    def stats(self) -> EngineStats:
        """What it has done and does."""
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
            rows=counters.rows,
            rows_with_variants=counters.rows_with_variants,
            sign_products=dict(self._model.sign_products),
            packed_products=dict(self._model.packed_products),
            busy_seconds=counters.busy_seconds,
            model_seconds=counters.model_seconds,
            kv_bytes_used=counters.kv_tokens * self.limits.kv_bytes_per_token,
            kv_bytes_reserved=counters.kv_bytes_reserved,
            kv_bytes_limit=self.config.kv_cache_size,
            first_token=counters.first_token.snapshot(),
            per_token=counters.per_token.snapshot(),
        )

    def retry_after_seconds(self) -> int:
        """When one that waits is likely to be let in: the mean time of the last answers over how many run at once."""
        seconds = self._counters.seconds_a_request()
        if seconds is None:
            return 1
        return min(_LONGEST_RETRY, max(1, math.ceil(seconds / max(1, self._loop.running))))

    def close(self) -> None:
        """End everything with ``cancelled``, let go of all variants, and wait for the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The caller's threads.

    def _prefetch(self, variant: str | None) -> None:
        if variant is None:
            return
        if self._source is None:
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {variant!r}: the base alone is served here")
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

    def _check_room(self, user: str) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise GymError(ErrorCode.UNAVAILABLE, "the engine is closed", "start it again")
        free = max(0, self.config.max_concurrent - self._loop.running)
        waiting = self._loop.waiting + len(self._arrived)
        own = self._loop.waiting_of(user) + sum(work.user == user for work in self._arrived)
        for count, most, who in (
            (waiting, self.config.max_queued, "requests"),
            (own, self.config.max_queued_per_user, "requests of this user"),
        ):
            if count >= most + free:
                self._refused += 1
                seconds = self.retry_after_seconds()
                raise GymError(
                    ErrorCode.BUSY, f"{count} {who} wait already", f"try again in {seconds} seconds"
                )

    def _enqueue(self, work: Work) -> None:
        with self._changed:
            self._check_room(work.user)
            self._arrived.append(work)
            self._changed.notify_all()

    def _call_off(self, work: Work) -> None:
        with self._changed:
            self._cancelled.append(work)
            self._changed.notify_all()

    # The engine's thread.

    def _run(self) -> None:
        import torch

        error: GymError | None = None
        try:
            with torch.inference_mode():
                while self._take():
                    if not self._loop.turn():
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
        """Take over what came in, waiting for it where nothing else is to be done; False to end."""
        with self._changed:
            timeout: float | None = _REST_SECONDS
            while not (self._closing or self._arrived or self._cancelled) and self._loop.idle:
                if not self._changed.wait(timeout):
                    self._loop.rest()
                    timeout = None
            if self._closing:
                return False
            for work in self._arrived:
                self._loop.put(work)
            self._arrived.clear()
            cancelled, self._cancelled = self._cancelled, []
        for work in cancelled:
            self._loop.cancel(work)
        return True

    def _pause(self) -> None:
        """All that waits waits for its variant: look again in a moment."""
        with self._changed:
            if not (self._closing or self._arrived or self._cancelled):
                self._changed.wait(_UNTIL_A_VARIANT_IS_HERE)


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


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All that say so: generation_config.json, config.json and the tokenizer; each an id, a list, or nothing."""
    found: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return frozenset(found)
