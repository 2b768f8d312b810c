"""The state of requests inside the engine: progress in prefill and decode, and the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gym_fed.serving.engine.detokenizing import StopTexts, TextDecoder
from gym_fed.serving.engine.request import CompletionOutput, Event, FinishReason, Generation, TokenLogprob
from gym_fed.serving.engine.sampling import RowSampler, SampledLogprob, SampledToken
from gym_fed.serving.engine.thoughts import PendingLogprobs
from gym_fed.serving.forward.chunk import HiddenMean
from gym_fed.serving.reasoning.base import AnswerSplit

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from torch import Tensor

    from gym_fed.core.errors import GymError
    from gym_fed.serving.engine.guided import Guide, TokenMask
    from gym_fed.serving.engine.proposals import Proposer
    from gym_fed.serving.engine.thoughts import Thought
    from gym_fed.serving.forward.chunk import PlacedPicture
    from gym_fed.serving.forward.kv_cache import KVCache
    from gym_fed.serving.forward.variant_weights import LoadedVariant


NO_TEXT = AnswerSplit()


class ScheduledRequest:
    """The state of an answer or embedding; after submission, only the engine's thread accesses it.

    Args:
        user: The user whose share its tokens count towards.
        variant_name: The variant; None for the base.
        prompt_ids: The token ids of the prompt, at least one.
    """

    hidden: HiddenMean | None = None
    """The mean of the last hidden states of its tokens, for an embedding."""

    cache_key = key_digest = ""
    """Only requests with equal keys share KV blocks; ``key_digest`` is the digest of the user's API key."""

    pictures: tuple[PlacedPicture, ...] = ()
    """The pictures in its prompt."""

    vocab_size = 0
    """The number of token ids of the variant at submission."""

    def __init__(self, user: str, variant_name: str | None, prompt_ids: list[int]) -> None:
        self.user, self.variant_name, self.prompt_ids = user, variant_name, prompt_ids
        self.ids = list(prompt_ids)
        """The prompt, and the answer so far."""
        self.variant: LoadedVariant | None = None
        """The variant, which is pinned from admission to the end, even if the request is preempted."""
        self.cache: KVCache | None = None
        """The KV cache while the request is running."""
        self.arrival = 0
        """The request's number in the order of submission."""
        self.cached_tokens = 0
        """Tokens of the prompt that were in the prefix cache."""
        self.bypassed_since = 0.0
        """The time when it was first at the head of the queue without room for its variant; 0 if never."""
        self.started = 0.0
        """The time of its first admission."""
        self.ended = False

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of the prompt and the answer."""
        return len(self.prompt_ids)

    @property
    def remaining(self) -> int:
        """The number of tokens that are not in the KV cache yet."""
        return len(self.ids) - (0 if self.cache is None else self.cache.length)

    def restart(self) -> None:
        """Reset the request after preemption, since the tokens in its KV cache must be computed again."""
        if self.hidden is not None:
            self.hidden = HiddenMean()

    def fail(self, error: GymError) -> None:
        """Report the error to the caller, unless the end was already reported."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Report the cancellation to the caller."""
        raise NotImplementedError


class GenerationSequence(ScheduledRequest):
    """The state of one answer.

    Args:
        generation: The caller's handle.
        decoder: The decoder of the tokenizer.
        max_tokens: Maximum number of tokens of the answer.
        end_ids: Tokens that end it.
        guide: The guide of its grammar, if it has one.
        thought: The state of its thought, which then has the guide; None if the answer does not think.
        proposer: Creates the proposer of next tokens from prompt and answer; None: tokens are not proposed.
    """

    def __init__(
        self,
        generation: Generation,
        decoder: TextDecoder,
        *,
        max_tokens: int,
        end_ids: frozenset[int],
        guide: Guide | None,
        thought: Thought | None = None,
        proposer: Callable[[list[int]], Proposer] | None = None,
    ) -> None:
        request = generation.request
        super().__init__(request.user, request.variant, request.prompt_ids)
        self.cache_key, self.key_digest = request.cache_key, request.key_digest
        self.pictures = request.pictures
        self.generation = generation
        self.max_tokens, self._guide, self._thought = max_tokens, guide, thought
        self.proposer = None if proposer is None else proposer(self.ids)
        self.sampler = RowSampler(request.sampling, request.prompt_ids, end_ids)
        self.token_ids: list[int] = []
        self.last_token_at, self.submitted = 0.0, time.monotonic()
        self.end_ids = end_ids
        sampling = request.sampling
        self._text = decoder.stream(
            request.prompt_ids, sampling.shown_token_ids, special=not sampling.skip_special_tokens
        )
        self._stops = StopTexts(sampling.stop)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._unreported = PendingLogprobs()
        self._reported = 0  # tokens of earlier events
        self._reported_thought = 0
        self._first_token_seconds = 0.0
        self._last: tuple[Event, CompletionOutput] | None = None

    @property
    def guide(self) -> TokenMask | None:
        """The grammar that constrains the next token; None without one."""
        if self._thought is not None:
            return self._thought if self._thought.masks else None
        return self._guide

    @property
    def decoding(self) -> bool:
        """True if all tokens but the newest, sampled one are in the KV cache."""
        return bool(self.token_ids) and self.remaining == 1

    @property
    def most_tokens(self) -> int:
        return len(self.prompt_ids) + self.max_tokens

    @property
    def most_proposed(self) -> int:
        """Maximum number of tokens to propose: the step that verifies them adds another one."""
        return self.max_tokens - len(self.token_ids) - 1

    def propose(self, most: int) -> list[int]:
        """Propose the next tokens, which a step then verifies."""
        if self.proposer is None:
            return []
        return self.proposer.propose(min(most, self.most_proposed))

    def verified(self, proposed: int, accepted: int) -> None:
        """Record how many of the proposed tokens were sampled, and drop the others."""
        if self.proposer is not None:
            self.proposer.observe(proposed, accepted)
        if self.cache is not None:
            self.cache.truncate(len(self.ids) - 1)

    def fail(self, error: GymError) -> None:
        self.generation._fail(error)

    def cancel(self) -> None:
        self.finish("cancelled")
        self.deliver()

    def push(self, sampled: SampledToken, now: float) -> FinishReason | None:
        """Add the next token, and report text that may be shown; return the finish reason, if the answer is done.

        Raises:
            GymError: Raised by the guide.
        """
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self.ids.append(token_id)
        self.sampler.push(token_id)
        if sampled.logprob is not None:
            self._logprobs.append(self._described(token_id, sampled.logprob))
        if len(self.token_ids) == 1:
            self._first_token_seconds = now - self.submitted
        if self._guide is not None and self._thought is None:
            self._guide.push(token_id)
        reason: FinishReason | None = None
        split = AnswerSplit()
        if self._ends_at(token_id):
            reason = "stop"
            settled = self._thought is None or not self._thought.held
            if settled and self._text.is_special(token_id) and self._in_answer(len(self.token_ids) - 1):
                split = AnswerSplit(text=self._compare_hidden(token_id))
        else:
            split = self._split(token_id)
            guide = self._guide if self._thought is None else self._thought
            if self._stops.matched or (guide is not None and guide.complete):
                reason = "stop"
            elif len(self.token_ids) >= self.max_tokens:
                reason = "length"
        if reason is not None:
            return self.finish(reason, split)
        if split.text or split.reasoning:
            self.generation._put(self._event(split))
        return None

    def _ends_at(self, token_id: int) -> bool:
        return token_id in self.end_ids and (self._thought is None or self._thought.may_end_at(token_id))

    def _split(self, token_id: int) -> AnswerSplit:
        """Decode a token, and return the text that may now be shown."""
        if self._thought is None:
            split = AnswerSplit(text=self._text.push(token_id))
        else:
            split = self._thought.push(token_id, self._text)
        text = self._stops.push(split.text)
        hidden = self._text.hides(token_id)
        index = len(self.token_ids) - 1
        if hidden and self._in_answer(index) and not self._stops.matched:
            text += self._compare_hidden(token_id)
        elif not hidden and self._logprobs:
            self._unreported.put(index, self._logprobs[index], self._text.span)
        return AnswerSplit(split.reasoning, text)

    def _compare_hidden(self, token_id: int) -> str:
        """Compare a hidden token with the stop texts, and return text before it that may now be shown."""
        return self._stops.push(self._text.bytes_of(token_id).decode(errors="replace"), hidden=True)

    def _described(self, token_id: int, sampled: SampledLogprob) -> TokenLogprob:
        bytes_of = self._text.bytes_of
        top = tuple((other, bytes_of(other), value) for other, value in sampled.top)
        return TokenLogprob(token_id, bytes_of(token_id), sampled.logprob, top)

    def _in_answer(self, index: int) -> bool:
        return self._thought is None or self._thought.in_answer(index)

    def finish(self, reason: FinishReason, split: AnswerSplit = NO_TEXT) -> FinishReason:
        """Create the last event, and return its reason: ``stop``, not ``length``, for a stop text in held-back text."""
        reasoning, text = split
        if not self._stops.matched:
            if self._thought is not None:
                rest = self._thought.end()
                reasoning += rest.reasoning
                text += self._stops.push(rest.text)
            if not self._stops.matched:
                text += self._stops.finish()
            elif reason == "length":
                reason = "stop"
        event = self._event(AnswerSplit(reasoning, text), reason)
        seconds = time.monotonic() - self.submitted
        completion = CompletionOutput(
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            logprobs=tuple(self._logprobs),
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            seconds_to_first_token=self._first_token_seconds if self.token_ids else seconds,
            seconds=seconds,
            reasoning="".join(self._reasoning),
            reasoning_tokens=self._reported_thought,
            is_unfinished=self._thought is not None and self._thought.is_unfinished,
        )
        self._last = event, completion
        return reason

    def deliver(self) -> None:
        """Report the end to the reader, after the slot and the variant have been freed."""
        if self._last is not None:
            self.generation._put(*self._last)

    def _event(self, split: AnswerSplit, reason: FinishReason | None = None) -> Event:
        self._texts.append(split.text)
        self._reasoning.append(split.reasoning)
        start, self._reported = self._reported, len(self.token_ids)
        held = 0 if self._thought is None else self._thought.held
        logprobs = self._unreported.take(self._text.position - held, self._stops, last=reason is not None)
        before, self._reported_thought = self._reported_thought, self._num_thought_tokens
        return Event(
            split.text,
            tuple(self.token_ids[start:]),
            tuple(logprob for index, logprob in logprobs if self._in_answer(index)),
            reason,
            0 if reason is None else self.cached_tokens,
            split.reasoning,
            self._reported_thought - before,
        )

    @property
    def _num_thought_tokens(self) -> int:
        return 0 if self._thought is None else self._thought.num_tokens


class EmbeddingSequence(ScheduledRequest):
    """The state of one embedding."""

    def __init__(
        self, prompt_ids: list[int], variant_name: str | None, user: str, future: Future[Tensor]
    ) -> None:
        super().__init__(user, variant_name, prompt_ids)
        self.future = future
        self.hidden = HiddenMean()

    def deliver(self) -> None:
        """Report the vector, at the end of the prefill."""
        assert self.hidden is not None
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.hidden.unit())

    def fail(self, error: GymError) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def cancel(self) -> None:
        self.future.cancel()
