"""One request inside the engine: its prefill and decode state, and when it is done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gym_fed.serving.engine.detokenizing import StopTexts, TextDecoder
from gym_fed.serving.engine.generation import Generation
from gym_fed.serving.engine.request import CompletionOutput, Event, FinishReason, TokenLogprob
from gym_fed.serving.engine.sampling import RowSampler, SampledToken
from gym_fed.serving.forward.hidden_mean import HiddenMean

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from gym_fed.errors import GymError
    from gym_fed.serving.engine.guided import Guide
    from gym_fed.serving.forward.loaded import LoadedVariant


class ScheduledRequest:
    """State that an answer and an embedding share; after submission only the engine's thread touches it.

    Args:
        user: To whom the fair queue charges its tokens.
        variant_name: None: the base.
        prompt_ids: Tokens of the prefill.
        kv_bytes: KV cache that it may need at most.
    """

    hidden: HiddenMean | None = None
    """Collects the last hidden states of its tokens."""

    def __init__(self, user: str, variant_name: str | None, prompt_ids: list[int], kv_bytes: int) -> None:
        self.user = user
        self.variant_name = variant_name
        self.prompt_ids = prompt_ids
        self.kv_bytes = kv_bytes
        self.variant: LoadedVariant | None = None
        self.cache: Any = None
        self.prefilled = 0
        """Prompt tokens in the cache: the progress of the prefill."""
        self.bypassed_since = 0.0
        """When it was first at the head of the queue without room for its variant."""
        self.started = 0.0
        self.ended = False

    @property
    def cache_tokens(self) -> int:
        """Tokens that its cache may hold at most."""
        return len(self.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens in its cache."""
        return self.prefilled

    def fail(self, error: GymError) -> None:
        """Report the error to the caller, unless an end was reported already."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Report to the caller that it was cancelled."""
        raise NotImplementedError


class GenerationSequence(ScheduledRequest):
    """State of one generation.

    Args:
        generation: The caller's end.
        decoder: Of the tokenizer.
        max_tokens: Most tokens of the answer.
        kv_bytes: KV cache that it may need at most.
        end_ids: Tokens that end it.
        guide: Of its JSON schema.
    """

    def __init__(
        self,
        generation: Generation,
        decoder: TextDecoder,
        *,
        max_tokens: int,
        kv_bytes: int,
        end_ids: frozenset[int],
        guide: Guide | None,
    ) -> None:
        request = generation.request
        super().__init__(request.user, request.variant, request.prompt_ids, kv_bytes)
        self.generation = generation
        self.max_tokens = max_tokens
        self.guide = guide
        self.sampler = RowSampler(request.sampling, request.prompt_ids)
        self.token_ids: list[int] = []
        self.last_token_at = 0.0
        self.submitted = time.monotonic()
        self._end_ids = end_ids
        self._text = decoder.stream(request.prompt_ids)
        self._stops = StopTexts(request.sampling.stop)
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._reported = 0  # tokens of earlier events
        self._first_token_seconds = 0.0
        self._last: tuple[Event, CompletionOutput] | None = None

    @property
    def decoding(self) -> bool:
        """Whether its prefill is done."""
        return self.prefilled >= len(self.prompt_ids)

    @property
    def cache_tokens(self) -> int:
        return len(self.prompt_ids) + self.max_tokens

    @property
    def length(self) -> int:
        return self.prefilled + max(0, len(self.token_ids) - 1)

    def fail(self, error: GymError) -> None:
        self.generation._fail(error)

    def cancel(self) -> None:
        self.finish("cancelled")
        self.deliver()

    def push(self, sampled: SampledToken, now: float) -> FinishReason | None:
        """Take its next token and report text that is safe to show. Returns why it is done, if it is.

        Raises:
            GymError: Of the guide.
        """
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self.sampler.push(token_id)
        if sampled.logprob is not None:
            self._logprobs.append(sampled.logprob)
        if len(self.token_ids) == 1:
            self._first_token_seconds = now - self.submitted
        if self.guide is not None:
            self.guide.push(token_id)
        reason: FinishReason | None = None
        text = ""
        if token_id in self._end_ids:
            reason = "stop"
        else:
            text = self._stops.push(self._text.push(token_id))
            if self._stops.matched or (self.guide is not None and self.guide.complete):
                reason = "stop"
            elif len(self.token_ids) >= self.max_tokens:
                reason = "length"
        if reason is not None:
            return self.finish(reason, text)
        if text:
            self.generation._put(self._event(text))
        return None

    def finish(self, reason: FinishReason, text: str = "") -> FinishReason:
        """Make the last event, for ``deliver``. Returns the reason: the held-back text may have a stop text."""
        if not self._stops.matched:
            text += self._stops.push(self._text.finish())
            if not self._stops.matched:
                text += self._stops.finish()
            elif reason == "length":
                reason = "stop"
        event = self._event(text, reason)
        seconds = time.monotonic() - self.submitted
        completion = CompletionOutput(
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            logprobs=tuple(self._logprobs),
            prompt_tokens=len(self.prompt_ids),
            seconds_to_first_token=self._first_token_seconds if self.token_ids else seconds,
            seconds=seconds,
        )
        self._last = event, completion
        return reason

    def deliver(self) -> None:
        """Report the end to the reader; called after its place and its variant are free."""
        if self._last is not None:
            self.generation._put(*self._last)

    def _event(self, text: str, reason: FinishReason | None = None) -> Event:
        self._texts.append(text)
        start, self._reported = self._reported, len(self.token_ids)
        return Event(text, tuple(self.token_ids[start:]), tuple(self._logprobs[start:]), reason)


class EmbeddingSequence(ScheduledRequest):
    """State of one embedding.

    Args:
        future: The caller's end.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        variant_name: str | None,
        user: str,
        kv_bytes: int,
        future: Future[Tensor],
    ) -> None:
        super().__init__(user, variant_name, prompt_ids, kv_bytes)
        self.future = future
        self.hidden = HiddenMean()

    def deliver(self) -> None:
        """Report the vector: the prefill is done."""
        assert self.hidden is not None
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.hidden.unit())

    def fail(self, error: GymError) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def cancel(self) -> None:
        self.future.cancel()
