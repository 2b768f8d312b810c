"""Continuous batching of requests for different variants of one base; any thread may submit requests.

    with Engine(MultiVariantModel(model), tokenizer, store) as engine:
        for event in engine.submit(GenerationRequest(ids, variant="alice")):
            print(event.text, end="")

When a step raises, each of its requests is tried alone. Requests that raise again fail with their ``GymError``, or with
``INTERNAL`` and a logged traceback; the engine continues. After three consecutive failures ``healthy`` is False until a
step succeeds. If the loop itself fails, all requests fail, and new ones are refused.

A request holds the KV blocks of its tokens so far. If a running answer needs a block and none is free, another answer
is preempted, and its tokens are computed again later. Only a request that would not fit alone is refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.config.serving import EngineConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.base import end_ids
from gym_fed.serving.engine.draft_model import DraftModel
from gym_fed.serving.engine.input_queue import InputQueue
from gym_fed.serving.engine.limits import Limits, context_length
from gym_fed.serving.engine.loop import EngineLoop
from gym_fed.serving.engine.proposals import DraftProposer, NgramProposer, Proposer
from gym_fed.serving.engine.request import Generation, GenerationRequest, PendingEmbedding
from gym_fed.serving.engine.sequence import EmbeddingSequence, GenerationSequence
from gym_fed.serving.engine.stats import Counters, EngineStats
from gym_fed.serving.engine.thoughts import Thought
from gym_fed.serving.engine.vocabularies import Vocabularies, Vocabulary

if TYPE_CHECKING:
    from gym_fed.serving.engine.guided import Guide
    from gym_fed.serving.engine.request import SamplingParams
    from gym_fed.serving.forward.kv_cache import KVPool
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.variant_weights import VariantSource


log = logging.getLogger("gym_fed")

_PROPOSERS: dict[str, type[Proposer]] = {"ngram": NgramProposer, "draft": DraftProposer}
_VARIANT_POLL_SECONDS = 0.001
_IDLE_SECONDS = 1.0
"""Idle seconds after which the engine releases the variants of the last step, so that they can be evicted."""


class Engine:
    """Runs requests until it is closed. Nothing else may use the model, since the engine uses it in its own thread.

    Args:
        served: The base, ready for multi-variant steps.
        tokenizer: Its tokenizer.
        source: The source of variants; None: only the base is served.
        config: Limits.
        draft: The model that proposes tokens with ``speculative: draft``.

    Raises:
        GymError: ``CONFIG_INVALID`` for a ``max_context`` beyond the model's own, for a ``kv_cache_size`` smaller
            than a block, and for ``speculative`` on the general path; ``USAGE`` for a draft that is missing or not
            used.
    """

    def __init__(
        self,
        served: MultiVariantModel,
        tokenizer: Any,
        source: VariantSource | None = None,
        config: EngineConfig | None = None,
        draft: MultiVariantModel | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._kv_bytes = self._bytes_for(served, draft)
        pool = served.new_pool(self._kv_bytes)
        self._require_paged(pool, draft)
        self.limits = Limits(
            context=context_length(served.model.config, self.config.max_context),
            vocab_size=served.vocabulary,
            kv_bytes_per_token=served.bytes_per_token,
            kv_bytes=(pool.num_blocks - pool.fixed_blocks) * pool.block_bytes,
        )
        self.end_ids = end_ids(served.model, tokenizer)
        self.vocabularies = Vocabularies(Vocabulary(tokenizer, served.vocabulary, self.end_ids), source)
        self._counters = Counters()
        self._model = served
        drafting = None if draft is None else self._drafting(draft)
        self._loop = EngineLoop(served, pool, source, self.config, self._counters, drafting)
        self._queue = InputQueue(self.config, self._loop, self._counters)
        self._inputs = InputProcessor(self.vocabularies, self.limits, source, self._queue, self.config)
        self._thread = threading.Thread(target=self._run, name="gym-fed-engine", daemon=True)
        self._thread.start()

    def _bytes_for(self, served: MultiVariantModel, draft: MultiVariantModel | None) -> int:
        """Return the base's part of ``kv_cache_size``: base and draft have room for the same number of tokens."""
        size, own = self.config.kv_cache_size, served.bytes_per_token
        return size if draft is None else size * own // (own + draft.bytes_per_token)

    def _require_paged(self, pool: KVPool, draft: MultiVariantModel | None) -> None:
        """Check that rejected tokens can be dropped from the KV caches of base and draft."""
        kind = self.config.speculative
        if (kind == "draft") != (draft is not None):
            raise GymError(
                ErrorCode.USAGE, f"engine.speculative is {kind}", "pass a draft with draft, and only then"
            )
        if kind == "off" or (pool.paged and (draft is None or draft.pool.paged)):
            return
        model = "the draft" if pool.paged else "this"
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"engine.speculative: {kind}: the state of {model} model cannot be rolled back for rejected tokens",
            "leave engine.speculative off",
        )

    def _drafting(self, draft: MultiVariantModel) -> DraftModel:
        """Return the draft, with room in its KV cache for as many tokens as the base's."""
        tokens = self.limits.kv_bytes // self.limits.kv_bytes_per_token
        kv_bytes = tokens * draft.bytes_per_token
        context = context_length(draft.model.config, None)
        return DraftModel(draft, kv_bytes, self.limits.vocab_size, self.config.max_batch_tokens, context)

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request.

        Raises:
            GymError: ``USAGE`` for an invalid parameter; ``TOO_LARGE`` for a prompt that does not fit;
                ``NOT_FOUND`` for an unknown variant; ``DATA_INVALID`` for a JSON schema that cannot be enforced;
                ``BUSY`` if too many requests wait, with the seconds in its hint; ``UNAVAILABLE`` after ``close``.
        """
        sequence = self._sequence(request)
        self._queue.put([sequence])
        return sequence.generation

    def require_room(self, prompt_ids: list[int], user: str, variant: str | None = None) -> None:
        """Check a request's length and the room in the queue as ``submit`` does, before its inputs are computed.

        Raises:
            GymError: See ``submit``.
        """
        replace(self.limits, vocab_size=self.vocabularies.of(variant).size).check_prompt(prompt_ids)
        self._queue.require_room(user)

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Queue requests of one user that enter the same step.

        An idle engine without ``step_stretch`` and ``prefix_cache`` batches them the same way in every run, regardless
        of timing.

        Raises:
            GymError: See ``submit``; none of them is queued then.
        """
        sequences = [self._sequence(request) for request in requests]
        if sequences:
            self._queue.put(sequences)
        return [sequence.generation for sequence in sequences]

    def _sequence(self, request: GenerationRequest) -> GenerationSequence:
        sequence = self._inputs.sequence(request)
        sequence.generation._on_cancel = partial(self._queue.cancel, sequence)
        return sequence

    def embed(self, prompt_ids: list[int], variant: str | None = None, user: str = "") -> PendingEmbedding:
        """Queue the embedding of a text in the queue of the answers.

        Raises:
            GymError: See ``submit``.
        """
        request = self._inputs.embedding(prompt_ids, variant, user)
        self._queue.put([request])
        request.future.add_done_callback(
            lambda future: self._queue.cancel(request) if future.cancelled() else None
        )
        return PendingEmbedding(request.future)

    @property
    def healthy(self) -> bool:
        """True if the loop is running and its last three steps did not all fail."""
        queue = self._queue
        return self._thread.is_alive() and queue.broken is None and not queue.closing and self._loop.healthy

    def stats(self) -> EngineStats:
        """Return the counters and gauges of the engine."""
        return self._counters.snapshot(
            healthy=self.healthy,
            running=self._loop.running,
            queued=self._loop.waiting + len(self._queue),
            refused=self._queue.refused,
            forwards=dict(self._model.forwards),
            sign_products=dict(self._model.sign_products),
            packed_products=dict(self._model.packed_products),
            kv_bytes_limit=self._kv_bytes,
        )

    def retry_after_seconds(self) -> int:
        """Estimate the wait of a new request, in whole seconds."""
        return self._queue.retry_after_seconds()

    def close(self) -> None:
        """Cancel all requests, release all variants, and wait for the thread."""
        self._queue.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called on the engine's thread.

    def _run(self) -> None:
        import torch

        error: GymError | None = None
        try:
            with torch.inference_mode():
                while self._take():
                    if not self._loop.step():  # all waiting requests wait for their variants
                        self._queue.wait(_VARIANT_POLL_SECONDS)
        except BaseException as broken:
            log.exception("the engine's loop failed")
            error = GymError(
                ErrorCode.INTERNAL,
                f"the engine failed: {broken!r}",
                "the log has the traceback; restart the server",
            )
        self._loop.end_all(self._queue.shut(error), error)

    def _take(self) -> bool:
        """Take new requests and cancellations, and wait for them when idle; return False if the engine is closing."""
        if self._loop.idle:
            if not self._queue.wait(_IDLE_SECONDS):
                self._loop.release_variants()
                self._queue.wait(None)
            self._queue.gather()
        cancelled = self._queue.take()
        for request in cancelled or ():
            self._loop.cancel(request)
        return cancelled is not None


class InputProcessor:
    """Validates requests, and creates their sequences.

    Args:
        vocabularies: The tokenizers of the base and its variants.
        limits: The limits of the model and its KV cache.
        source: The source of variants; None: only the base is served.
        queue: The queue, which may refuse a request before its grammar is compiled or its variant is loaded.
        config: The engine's config, for speculative decoding.
    """

    def __init__(
        self,
        vocabularies: Vocabularies,
        limits: Limits,
        source: VariantSource | None,
        queue: InputQueue,
        config: EngineConfig,
    ) -> None:
        self._vocabularies, self._limits = vocabularies, limits
        self._source, self._queue = source, queue
        kind = _PROPOSERS.get(config.speculative)
        self._proposer = None if kind is None else partial(kind, most=config.speculative_tokens)

    def sequence(self, request: GenerationRequest) -> GenerationSequence:
        """Create the sequence of a generation request, and start loading its variant.

        Raises:
            GymError: See ``Engine.submit``.
        """
        params = request.sampling
        vocabulary = self._vocabulary(request.variant)
        limits = replace(self._limits, vocab_size=vocabulary.size)
        limits.check_prompt(request.prompt_ids, request.pictures)
        limits.check_sampling(params)
        max_tokens = limits.answer_tokens(request)
        self._queue.require_room(request.user)
        guide = None if params.held_to is None else vocabulary.guides().guide(params.held_to)
        self._prefetch(request.variant, request.user)
        own_ends = frozenset(params.stop_token_ids)
        end_ids = own_ends if params.ignore_eos else own_ends | vocabulary.end_ids
        sequence = GenerationSequence(
            Generation(request),
            vocabulary.decoder,
            max_tokens=max_tokens,
            end_ids=end_ids,
            guide=guide,
            thought=self._thought(params, guide, end_ids, vocabulary),
            proposer=self._proposer,
        )
        sequence.vocab_size = vocabulary.size
        return sequence

    def _vocabulary(self, variant: str | None) -> Vocabulary:
        if variant is not None and self._source is None:
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {variant!r}: this server has only the base")
        return self._vocabularies.of(variant)

    def _thought(
        self, params: SamplingParams, guide: Guide | None, end_ids: frozenset[int], vocabulary: Vocabulary
    ) -> Thought | None:
        thinking = params.thinking
        splitter = None if thinking is None else thinking.splitter()
        if thinking is None or splitter is None:
            return None
        return Thought(
            thinking.parser,
            splitter,
            budget=thinking.budget,
            guide=guide,
            end_ids=end_ids,
            stop_ids=frozenset(params.stop_token_ids) - vocabulary.end_ids,
            vocab_size=vocabulary.size,
        )

    def embedding(self, prompt_ids: list[int], variant: str | None, user: str) -> EmbeddingSequence:
        """Create the sequence of an embedding request, and start loading its variant.

        Raises:
            GymError: See ``Engine.submit``.
        """
        vocabulary = self._vocabulary(variant)
        replace(self._limits, vocab_size=vocabulary.size).check_prompt(prompt_ids)
        self._limits.check_kv_cache(len(prompt_ids), 0)
        self._queue.require_room(user)
        self._prefetch(variant, user)
        sequence = EmbeddingSequence(prompt_ids, variant, user, Future())
        sequence.vocab_size = vocabulary.size
        return sequence

    def _prefetch(self, variant: str | None, user: str) -> None:
        if variant is not None and self._source is not None:
            self._source.prefetch(variant, user)
