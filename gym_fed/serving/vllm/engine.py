"""The engine for ``engine.kind: vllm``: gym-fed's queue, limits and text processing in front of a vLLM server."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.engine import InputProcessor
from gym_fed.serving.engine.input_queue import InputQueue
from gym_fed.serving.engine.request import Generation, GenerationRequest, PendingEmbedding
from gym_fed.serving.engine.stats import Counters, EngineStats
from gym_fed.serving.engine.vocabularies import Vocabularies, Vocabulary
from gym_fed.serving.vllm.bodies import CacheSalts, require_supported
from gym_fed.serving.vllm.client import VllmAddress, VllmClient
from gym_fed.serving.vllm.loop import VllmLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from gym_fed.config.serving import EngineConfig
    from gym_fed.serving.engine.limits import Limits
    from gym_fed.serving.forward.variant_weights import VariantSource

log = logging.getLogger("gym_fed")

_LOADING_POLL_SECONDS = 0.005
"""Seconds between two checks of variants that are being verified."""


class VllmServer(Protocol):
    """A vLLM server, started by gym-fed or reached by its URL.

    Attributes:
        address: The address of the server.
        base: The base's name in vLLM.
        on_change: Called from any thread when ``ready`` changes.
    """

    address: VllmAddress
    base: str
    on_change: Callable[[], None]

    @property
    def ready(self) -> bool:
        """True while the server answers."""

    def suspect(self) -> None:
        """Treat vLLM as unavailable until it answers a health check, since a request could not reach it."""

    def close(self) -> None:
        """Stop watching the server, and stop it if it was started here."""


class VllmEngine:
    """Runs requests in vLLM until it is closed. Implements ``ServingEngine``.

    Args:
        server: The vLLM server, which the engine closes.
        tokenizer: The tokenizer of the base.
        source: The source of variants, which verifies signatures; None: only the base is served.
        config: The limits of the queue.
        limits: The limits of the model.
        end_ids: Tokens that end an answer.

    Attributes:
        server: The vLLM server.
    """

    def __init__(
        self,
        server: VllmServer,
        tokenizer: Any,
        source: VariantSource | None,
        config: EngineConfig,
        limits: Limits,
        end_ids: frozenset[int],
    ) -> None:
        self.limits, self.end_ids = limits, end_ids
        self._config, self.server = config, server
        self._counters = Counters()
        self._source = source
        self._events = asyncio.new_event_loop()
        self._client = VllmClient(server.address)
        self._loop = VllmLoop(
            self._client,
            server.base,
            source,
            config.max_concurrent,
            CacheSalts(secrets.token_bytes(32), config.prefix_cache),
            self._counters,
            limits.vocab_size,
        )
        self._changed = asyncio.Event()
        self._queue = InputQueue(config, self._loop, self._counters, self._wake)
        vocabularies = Vocabularies(Vocabulary(tokenizer, limits.vocab_size, end_ids), source)
        self._inputs = InputProcessor(vocabularies, limits, source, self._queue, config)
        self._loop.on_end, self._loop.on_away = self._changed.set, server.suspect
        server.on_change = self._wake
        self._thread = threading.Thread(target=self._run, name="gym-fed-vllm", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request.

        Raises:
            GymError: See ``Engine.submit``; ``USAGE`` for a parameter that vLLM does not support, or a variant with
                added tokens; ``UNAVAILABLE`` while vLLM is being started or restarted.
        """
        if request.pictures:
            raise GymError(ErrorCode.USAGE, "engine: vllm does not support images", "use engine: own")
        require_supported(request.sampling)
        self._require_base_tokens(request.variant)
        self._require_ready()
        sequence = self._inputs.sequence(request)
        sequence.generation._on_cancel = partial(self._queue.cancel, sequence)
        self._queue.put([sequence])
        return sequence.generation

    def require_room(self, prompt_ids: list[int], user: str, variant: str | None = None) -> None:
        """Check a request's length and the room in the queue. Raises the errors of ``submit``."""
        self._require_base_tokens(variant)
        self._require_ready()
        self.limits.check_prompt(prompt_ids)
        self._queue.require_room(user)

    def embed(self, prompt_ids: list[int], variant: str | None = None, user: str = "") -> PendingEmbedding:
        """Refuse embeddings, which this engine does not compute.

        Raises:
            GymError: ``USAGE``.
        """
        raise GymError(ErrorCode.USAGE, "engine: vllm does not support embeddings", "use engine: own")

    @property
    def healthy(self) -> bool:
        """True if the loop is running and vLLM answers."""
        queue = self._queue
        return self._thread.is_alive() and queue.broken is None and not queue.closing and self.server.ready

    def stats(self) -> EngineStats:
        """Return the counters and gauges of the gateway; vLLM's own metrics count steps and KV blocks."""
        return self._counters.snapshot(
            healthy=self.healthy,
            running=self._loop.running,
            queued=self._loop.waiting + len(self._queue),
            refused=self._queue.refused,
            forwards={},
            sign_products={},
            packed_products={},
            kv_bytes_limit=self._config.kv_cache_size,
        )

    def retry_after_seconds(self) -> int:
        """Estimate the wait of a new request, in whole seconds."""
        return self._queue.retry_after_seconds()

    def close(self) -> None:
        """Cancel all requests, and close the server."""
        self._queue.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.server.close()

    def _require_base_tokens(self, variant: str | None) -> None:
        if (
            variant is not None
            and self._source is not None
            and self._source.added_tokens(variant) is not None
        ):
            raise GymError(
                ErrorCode.USAGE,
                f"variant {variant!r} changes the base's tokenizer, which engine: vllm does not support",
                "use engine: own",
            )

    def _require_ready(self) -> None:
        if not self.server.ready and not self._queue.closing:
            raise GymError(ErrorCode.UNAVAILABLE, "vLLM is restarting", "try again in a moment")

    def _wake(self) -> None:
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._changed.set)

    # Called on the engine's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._events)
        try:
            self._events.run_until_complete(self._serve())
        finally:
            self._events.close()

    async def _serve(self) -> None:
        error: GymError | None = None
        try:
            while (cancelled := self._queue.take()) is not None:
                for request in cancelled:
                    self._loop.cancel(request)
                if self.server.ready:
                    self._loop.admit()
                await self._wait()
        except BaseException as broken:
            log.exception("the engine's loop failed")
            error = GymError(
                ErrorCode.INTERNAL,
                f"the engine failed: {broken!r}",
                "the log has the traceback; restart the server",
            )
        await self._loop.end_all(self._queue.shut(error), error)
        await self._client.close()

    async def _wait(self) -> None:
        """Wait for a change, but only a few milliseconds if requests may be waiting for their variants."""
        room = self._loop.running < self._config.max_concurrent
        polls = room and self._loop.waiting and self.server.ready
        try:
            await asyncio.wait_for(self._changed.wait(), _LOADING_POLL_SECONDS if polls else None)
        except TimeoutError:
            return
        self._changed.clear()
