"""Checks a request against the model's limits, and makes the sequence that the engine schedules of it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.generation import Generation
from gym_fed.serving.engine.sequence import EmbeddingSequence, GenerationSequence

if TYPE_CHECKING:
    from gym_fed.config.serving import EngineConfig
    from gym_fed.serving.engine.detokenizing import TextDecoder
    from gym_fed.serving.engine.guided import GuideFactory
    from gym_fed.serving.engine.input_queue import InputQueue
    from gym_fed.serving.engine.limits import Limits
    from gym_fed.serving.engine.request import GenerationRequest
    from gym_fed.serving.forward.loaded import VariantSource


class InputProcessor:
    """Makes sequences of one model's requests.

    Args:
        tokenizer: Of the model.
        decoder: Of the tokenizer.
        limits: Of the model and its KV cache.
        end_ids: Tokens that end an answer.
        source: Supplies variants; None: only the base is served.
        queue: Has room for the request, or refuses it before a grammar is compiled and a variant loaded.
        config: Of speculative decoding.
    """

    def __init__(
        self,
        tokenizer: Any,
        decoder: TextDecoder,
        limits: Limits,
        end_ids: frozenset[int],
        source: VariantSource | None,
        queue: InputQueue,
        config: EngineConfig,
    ) -> None:
        self._tokenizer, self._decoder = tokenizer, decoder
        self._limits, self._end_ids = limits, end_ids
        self._source, self._queue = source, queue
        self._speculative_tokens = 0 if config.speculative == "off" else config.speculative_tokens
        self._guides: GuideFactory | None = None
        self._guides_lock = threading.Lock()

    def sequence(self, request: GenerationRequest) -> GenerationSequence:
        """Of a request for an answer; its variant begins to load.

        Raises:
            GymError: As ``Engine.submit``.
        """
        params = request.sampling
        self._limits.check_prompt(request.prompt_ids, request.pictures)
        self._limits.check_sampling(params)
        max_tokens = self._limits.answer_tokens(request)
        self._queue.require_room(request.user)
        guide = None if params.held_to is None else self._guide_factory().guide(params.held_to)
        self._prefetch(request.variant)
        own_ends = frozenset(params.stop_token_ids)
        return GenerationSequence(
            Generation(request),
            self._decoder,
            max_tokens=max_tokens,
            end_ids=own_ends if params.ignore_eos else own_ends | self._end_ids,
            guide=guide,
            speculative_tokens=self._speculative_tokens,
        )

    def embedding(self, prompt_ids: list[int], variant: str | None, user: str) -> EmbeddingSequence:
        """Of a request for an embedding; its variant begins to load.

        Raises:
            GymError: As ``Engine.submit``.
        """
        self._limits.check_prompt(prompt_ids)
        self._limits.check_kv_cache(len(prompt_ids), 0)
        self._queue.require_room(user)
        self._prefetch(variant)
        return EmbeddingSequence(prompt_ids, variant, user, Future())

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

                self._guides = GuideFactory(self._tokenizer, self._limits.vocab_size, self._end_ids)
            return self._guides
