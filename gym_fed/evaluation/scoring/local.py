"""Score a base and its variants in this process with the batched steps of serving.

A window of requests becomes trees of token sequences (``tree``). Short trees are computed as a whole, many per forward
pass (``window``). The nodes of long trees are computed depth first, many per step, each with the KV cache of its
parent. A window is computed under every model before the next begins, so a partial evaluation is complete for all
models. Log-softmax is computed in float32, for scored rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gym_quant.kernels.attention import BLOCK_TOKENS

from gym_fed.config.serving import EngineConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.evaluation.scoring.greedy import LONGEST_PROMPT, GreedyPrompt, GreedyWriter
from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult, Continuation, Loglikelihood
from gym_fed.evaluation.scoring.window import ScoredText, Sums, TreeNode, Window, windows
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.limits import context_length
from gym_fed.serving.engine.request import CompletionOutput, GenerationRequest, SamplingParams
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.reasoning.answers import AnswerReader

if TYPE_CHECKING:
    from gym_fed.serving.forward.kv_cache import KVCache
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.variant_weights import LoadedVariant
    from gym_fed.serving.reasoning.base import Thinking


_WINDOW_TOKENS = 4096
_STEP_TOKENS = 1024
_LOGITS_BYTES = 128 << 20
_MAX_CONCURRENT = 64
_GROUP = 512
"""Prompts queued together, so that the batches of a run do not depend on timing."""


class LocalScorer:
    """A ``Scorer`` of a served model.

    Args:
        variants: Variants by name; None is the base itself.
        max_length: Context in tokens; by default the model's own.
        on_close: Called at the end, to close the caller's resources.

    Raises:
        GymError: ``USAGE`` for no models.
    """

    def __init__(
        self,
        served: MultiVariantModel,
        tokenizer: Any,
        variants: Mapping[str, LoadedVariant | None],
        *,
        max_length: int | None = None,
        step_tokens: int = _STEP_TOKENS,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        if not variants:
            raise GymError(ErrorCode.USAGE, "no model to evaluate")
        self.models = tuple(variants)
        self.tokenizer = tokenizer
        self.max_length = max_length or context_length(served.model.config, None)
        self._served = served
        self._variants = dict(variants)
        self._step_tokens = step_tokens
        self._most_rows = max(1, _LOGITS_BYTES // (4 * served.vocabulary))
        self._on_close = on_close
        self._reader = AnswerReader(tokenizer)

    @property
    def identity(self) -> dict[str, str]:
        """The parts of the results' identity that depend on how answers are read."""
        return {"reasoning": self._reader.name} if self._reader.thinks else {}

    def close(self) -> None:
        self._on_close()

    def only(self, models: Sequence[str]) -> None:
        """See ``Scorer``."""
        self.models = tuple(models)
        self._variants = {name: self._variants[name] for name in models}

    def loglikelihoods(
        self, continuations: Sequence[Continuation], done: Collection[int] = ()
    ) -> Iterator[tuple[int, Mapping[str, Loglikelihood]]]:
        """See ``Scorer``.

        Raises:
            GymError: ``USAGE``; ``MODEL_INVALID`` for a model whose probabilities are not numbers.
        """
        texts = [self._text(place, continuation) for place, continuation in enumerate(continuations)]
        for part in windows(texts, _WINDOW_TOKENS):
            if all(text.place in done for text in part):
                continue
            window = Window(part, self._served, self._step_tokens, self._most_rows)
            sums: dict[str, dict[int, Loglikelihood]] = {}
            for name, variant in self._variants.items():
                sums[name] = self._score(name, variant, window)
            for text in part:
                if text.place not in done:
                    yield text.place, {name: sums[name][text.place] for name in self.models}

    def answers(self, prompts: Sequence[AnswerRequest]) -> Iterator[tuple[int, Mapping[str, AnswerResult]]]:
        """See ``Scorer``.

        Raises:
            GymError: ``USAGE``, ``TOO_LARGE``.
        """
        truncated = [self._truncated_prompt(request) for request in prompts]
        together = [
            place
            for place, request in enumerate(prompts)
            if self._served.attends_plainly
            and not any(variant is not None and variant.replaced for variant in self._variants.values())
            and request.temperature == 0
            and self._reader.thinking(truncated[place]) is None
            and len(truncated[place]) <= LONGEST_PROMPT
        ]
        if together:
            writer = GreedyWriter(
                self._served, self.tokenizer, self._variants, self._step_tokens, self._most_rows
            )
            greedy_prompts = [
                GreedyPrompt(
                    place,
                    truncated[place],
                    prompts[place].max_tokens,
                    tuple(filter(None, prompts[place].until)),
                )
                for place in together
            ]
            for place, written in writer.answers(greedy_prompts):
                cut = len(prompts[place].prompt_ids) - len(truncated[place])
                results = {}
                for name, answer in written.items():
                    reason = "stop" if answer.stopped else "length"
                    results[name] = self._result(
                        prompts[place], answer.token_ids, answer.margins, reason, cut
                    )
                yield place, results
        others = sorted(set(range(len(prompts))) - set(together))
        if others:
            yield from self._through_engine(prompts, truncated, others)

    def _through_engine(
        self, prompts: Sequence[AnswerRequest], truncated: Sequence[list[int]], places: Sequence[int]
    ) -> Iterator[tuple[int, Mapping[str, AnswerResult]]]:
        most = max(prompts[place].max_tokens for place in places)
        config = EngineConfig(
            max_concurrent=_MAX_CONCURRENT,
            max_queued_per_user=_GROUP * len(self.models),
            max_queued=_GROUP * len(self.models),
            max_batch_tokens=max(16, self._step_tokens),
            kv_cache_size=max(
                4 << 30, self._served.bytes_per_token * (self.max_length + most + BLOCK_TOKENS)
            ),
            prefix_cache=False,  # the same batches in every run
            step_stretch=None,
        )
        order = sorted(places, key=lambda place: -len(truncated[place]))
        served = {name: None if variant is None else name for name, variant in self._variants.items()}
        with Engine(self._served, self.tokenizer, _LoadedVariants(self._variants), config) as engine:
            for start in range(0, len(order), _GROUP):
                group = order[start : start + _GROUP]
                requests = [
                    GenerationRequest(
                        truncated[place],
                        _sampling(prompts[place], self._reader.thinking(truncated[place])),
                        variant,
                    )
                    for place in group
                    for variant in served.values()
                ]
                sent = iter(engine.submit_all(requests))
                for place in group:
                    outputs = {name: next(sent).result() for name in served}
                    yield (
                        place,
                        {
                            name: self._answer(prompts[place], truncated[place], output)
                            for name, output in outputs.items()
                        },
                    )

    # Log-likelihoods.

    def _text(self, place: int, continuation: Continuation) -> ScoredText:
        if not continuation.context_ids or not continuation.continuation_ids:
            raise GymError(
                ErrorCode.USAGE, f"request {place}: context and continuation need at least one token each"
            )
        if len(continuation.continuation_ids) > self.max_length:
            length = counted(len(continuation.continuation_ids), "token")
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"request {place}: its continuation has {length}, but the model's context has only {self.max_length}",
            )
        ids = continuation.context_ids + continuation.continuation_ids
        tail = ids[-(self.max_length + 1) :]
        return ScoredText(place, tail[:-1], continuation.continuation_ids, len(ids) - len(tail))

    def _score(self, name: str, variant: LoadedVariant | None, window: Window) -> dict[int, Loglikelihood]:
        """Score a window under one model."""
        sums = Sums(window, self._served.device)
        for step in window.together:
            parts = [(variant, len(step.token_ids), len(step.scored))]
            logits = self._served.step_together(
                step.token_ids, step.positions, parts, step.scored, step.attention, merge=True
            )
            sums.add(step.targets, logits)
        # Depth first, so that a node's cache is freed once its children are computed.
        waiting: list[tuple[TreeNode, KVCache | None]] = [(node, None) for node in reversed(window.large)]
        while waiting:
            nodes: list[TreeNode] = []
            chunks: list[Chunk] = []
            tokens = rows = 0
            while waiting:
                node, parent = waiting[-1]
                length, num_logits = node.end - node.begin, node.num_logits
                if chunks and (tokens + length > self._step_tokens or rows + num_logits > self._most_rows):
                    break
                waiting.pop()
                cache = self._served.new_cache() if parent is None else parent.branch()
                chunks.append(
                    Chunk(node.token_ids, cache, variant, num_logits > 0, num_logits=max(1, num_logits))
                )
                nodes.append(node)
                tokens, rows = tokens + length, rows + num_logits
            sums.add(window.targets(nodes), self._served.step(chunks, merge=True))
            for node, chunk in zip(reversed(nodes), reversed(chunks), strict=True):
                waiting += [(child, chunk.cache) for child in reversed(node.children)]
        return sums.results(name)

    # Answers.

    def _truncated_prompt(self, request: AnswerRequest) -> list[int]:
        if not request.prompt_ids:
            raise GymError(ErrorCode.USAGE, "a prompt needs at least one token")
        room = self.max_length - request.max_tokens
        if room < 1:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"an answer of {counted(request.max_tokens, 'token')} leaves no room for a prompt: the model's "
                f"context is {self.max_length}",
                "lower max_gen_toks in the task's generation_kwargs",
            )
        return list(request.prompt_ids[-room:])

    def _answer(
        self, request: AnswerRequest, prompt_ids: list[int], output: CompletionOutput
    ) -> AnswerResult:
        margins = [
            token.logprob - max((logprob for other, _, logprob in token.top if other != token.token_id))
            for token in output.logprobs
        ]
        cut = len(request.prompt_ids) - len(prompt_ids)
        result = self._result(request, output.token_ids, margins, output.finish_reason, cut)
        if not output.reasoning_tokens and not self._reader.has_headers(prompt_ids):
            return result
        return replace(result, text=output.text, thought=output.reasoning, is_unfinished=output.is_unfinished)

    def _result(
        self,
        request: AnswerRequest,
        token_ids: Sequence[int],
        margins: Sequence[float],
        finish_reason: str,
        cut: int,
    ) -> AnswerResult:
        # Decoded alone, as in the harness: the engine's text continues the prompt and has a leading space.
        text = str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        for stop in request.until:
            text = text.split(stop)[0] if stop else text
        reason = "stop" if finish_reason == "stop" else "length"
        return AnswerResult(text, tuple(token_ids), reason, cut, tuple(margins))


def _sampling(request: AnswerRequest, thinking: Thinking | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop=tuple(stop for stop in request.until if stop),
        logprobs=2,
        thinking=thinking,
    )


class _LoadedVariants:
    """A ``VariantSource`` of variants that stay in memory."""

    def __init__(self, variants: Mapping[str, LoadedVariant | None]) -> None:
        self._variants = {name: variant for name, variant in variants.items() if variant is not None}

    def prefetch(self, name: str, user: str) -> None:
        self.acquire(name)

    def poll(self, name: str, user: str) -> LoadedVariant | None:
        return self.acquire(name)

    def added_tokens(self, name: str) -> None:
        """Return None: no variant adds tokens."""

    def lacks_room(self, name: str) -> bool:
        return False

    def acquire(self, name: str) -> LoadedVariant:
        if name not in self._variants:
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {name!r}")
        return self._variants[name]

    def release(self, variant: LoadedVariant) -> None:
        """Do nothing: variants stay in memory."""
