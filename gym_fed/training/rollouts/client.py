"""Request answers from the vLLM of a training run, which may stop and restart without losing answers."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted
from gym_fed.serving.vllm.bodies import completion_body
from gym_fed.serving.vllm.client import NotConnectedError, VllmClient

if TYPE_CHECKING:
    from gym_fed.serving.engine.request import SamplingParams
    from gym_fed.serving.vllm.process import RemoteVllm, VllmProcess
    from gym_fed.training.rollouts.policy import RolloutPolicy

log = logging.getLogger("gym_fed.vllm")

_POLL_SECONDS = 0.2
_WATCH_SECONDS = 5.0
_ATTEMPTS = 3
"""Number of consecutive failures without any new answer after which the run ends."""
_GONE = (ErrorCode.UNAVAILABLE, ErrorCode.MODEL_INVALID)
"""Errors from a vLLM that has stopped, or that has restarted without the adapter."""
_CLOSE_SECONDS = 30.0
_ROUNDING = 1e-3
"""Maximum value of a log-probability, which may exceed 0 because of rounding errors."""


@dataclass(frozen=True)
class SampledAnswer:
    """The tokens of an answer, including its end token, and their log-probabilities at sampling."""

    token_ids: list[int]
    logprobs: list[float]


class RolloutClient:
    """Gets a policy's answers from one vLLM, on a separate thread. Generations are answered one after another.

    Args:
        server: The vLLM, an object that restarts or monitors it.
        sampling: Sampling parameters of all answers.
        end_ids: Tokens that end an answer.
        num_tokens: Size of the model's vocabulary.
        context: Maximum number of tokens of prompt and answer in vLLM.
        wait_seconds: Seconds without a response from vLLM after which the run ends.
    """

    def __init__(
        self,
        server: VllmProcess | RemoteVllm,
        sampling: SamplingParams,
        end_ids: frozenset[int],
        num_tokens: int,
        context: int,
        wait_seconds: float,
    ) -> None:
        self.resent = 0
        """The number of answers that were requested again because vLLM had stopped."""
        self._server, self._sampling, self._end_ids = server, sampling, end_ids
        self._num_tokens, self._context, self._wait_seconds = num_tokens, context, wait_seconds
        self._salt = secrets.token_hex(16)
        self._loaded: str | None = None
        self._turn = asyncio.Lock()
        self._client: VllmClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gym-fed-rollouts", daemon=True)
        self._thread.start()

    @property
    def samples_whole(self) -> bool:
        """True if answers are sampled from the model's whole distribution, changed only by the temperature."""
        sampling = self._sampling
        is_truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        return not is_truncated and sampling.repetition_penalty == 1

    def submit(
        self, policy: RolloutPolicy, prompts: Sequence[list[int]], seeds: Sequence[int]
    ) -> Future[list[SampledAnswer]]:
        """Answer prompts with a policy, after all earlier submissions.

        Args:
            policy: The policy, which is loaded first.
            prompts: Token ids of each prompt, one prompt per answer.
            seeds: One seed per answer, so that the same policy gives the same answer again.

        Returns:
            The answers, in the order of the prompts. A failure is a ``GymError``: ``UNAVAILABLE`` if vLLM does not
            restart, or an error from ``VllmClient.complete``.
        """
        return asyncio.run_coroutine_threadsafe(self._answer(policy, list(prompts), list(seeds)), self._loop)

    def wait(self, job: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the client's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    def require_sampling_logprobs(self, policy: RolloutPolicy, prompt: list[int]) -> None:
        """Refuse a vLLM whose reported log-probabilities differ from those that it samples from.

        With ``top_k`` 1, the most likely token must have probability 1.

        Raises:
            GymError: ``CONFIG_INVALID`` with vLLM's option.
        """
        greedy = replace(self._sampling, top_k=1, max_tokens=1)
        (answer,) = self.wait(self._answer(policy, [prompt], [0], greedy))
        if abs(answer.logprobs[0]) > 1e-6:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"vLLM at {self._server.address.url} reports log-probabilities before the sampling parameters are "
                "applied",
                "start it with --logprobs-mode processed_logprobs",
            )

    def close(self) -> None:
        """Cancel all requests, unload the adapter, and end the thread. Repeated calls have no effect."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is None:
            return
        if self._loaded is not None and self._server.ready:
            with suppress(NotConnectedError, GymError):  # errors no longer matter at the end of the run
                await self._client.unload_adapter(self._loaded)
        await self._client.close()

    async def _answer(
        self,
        policy: RolloutPolicy,
        prompts: list[list[int]],
        seeds: list[int],
        sampling: SamplingParams | None = None,
    ) -> list[SampledAnswer]:
        answers: dict[int, SampledAnswer] = {}
        failures = 0
        async with self._turn:
            while True:
                before = len(answers)
                await self._until_ready()
                try:
                    await self._load(policy, again=failures > 0)
                    await self._fill(policy, prompts, seeds, sampling or self._sampling, answers)
                    return [answers[index] for index in range(len(prompts))]
                except (NotConnectedError, GymError) as error:
                    failures = 1 if len(answers) > before else failures + 1
                    if isinstance(error, GymError) and error.code not in _GONE:
                        raise
                    if failures > _ATTEMPTS:
                        raise self._unavailable(
                            f"failed {counted(failures, 'time')} in a row ({error})"
                        ) from error
                    missing = len(prompts) - len(answers)
                    self.resent += missing
                    log.warning("vLLM stopped; requesting %s again (%s)", counted(missing, "answer"), error)
                    self._loaded = None
                    self._server.suspect()

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + self._wait_seconds
        while not self._server.ready:
            if time.monotonic() > deadline:
                raise self._unavailable(f"has not answered for {self._wait_seconds:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    def _unavailable(self, reason: str) -> GymError:
        url = self._server.address.url
        return GymError(ErrorCode.UNAVAILABLE, f"vLLM at {url} {reason}", "restart it, and resume the run")

    async def _load(self, policy: RolloutPolicy, *, again: bool) -> None:
        if self._client is None:
            self._client = VllmClient(self._server.address)
        if self._loaded == policy.name:
            return
        if again:  # the adapter may be loaded already
            await self._client.unload_adapter(policy.name)
        await self._client.load_adapter(policy.name, policy.content)
        previous, self._loaded = self._loaded, policy.name
        if previous is not None:
            await self._client.unload_adapter(previous)

    async def _fill(
        self,
        policy: RolloutPolicy,
        prompts: list[list[int]],
        seeds: list[int],
        sampling: SamplingParams,
        answers: dict[int, SampledAnswer],
    ) -> None:
        """Request all missing answers at once.

        Raises:
            NotConnectedError: If a request failed; or the ``GymError`` of the first failure.
        """
        running: dict[asyncio.Task[SampledAnswer], int] = {}
        for index in range(len(prompts)):
            if index not in answers:
                request = self._request(policy, prompts[index], replace(sampling, seed=seeds[index]))
                running[asyncio.create_task(request)] = index
        waiting = set(running)
        errors: list[BaseException] = []
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=_WATCH_SECONDS)
                for task in done:
                    if (error := task.exception()) is not None:
                        errors.append(error)
                    else:
                        answers[running[task]] = task.result()
                if waiting and not self._server.ready:
                    raise GymError(ErrorCode.UNAVAILABLE, "vLLM does not answer", "see its log")
        finally:
            for task in waiting:
                task.cancel()
        if errors:
            raise errors[0]

    async def _request(
        self, policy: RolloutPolicy, prompt: list[int], sampling: SamplingParams
    ) -> SampledAnswer:
        assert self._client is not None
        room = self._context - len(prompt)
        if room < 1:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"a prompt has {counted(len(prompt), 'token')}, but vLLM's context is {self._context}",
                "shorten the prompt",
            )
        body = completion_body(
            policy.name,
            prompt,
            sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            end_ids=self._end_ids,
            salt=self._salt,
            stream=False,
        )
        chunk = await self._client.complete(body)
        answer = SampledAnswer(list(chunk.token_ids), [each.logprob for each in chunk.logprobs])
        _require_sampled(answer, body["max_tokens"], self._num_tokens)
        return answer


def _require_sampled(answer: SampledAnswer, max_tokens: int, num_tokens: int) -> None:
    """Refuse an answer that cannot be a sample, since its numbers would end the run later or ruin the weights.

    Raises:
        GymError: ``PROTOCOL_MISMATCH`` with the problem.
    """
    ids, logprobs = answer.token_ids, answer.logprobs
    refuse_first(
        (
            not 1 <= len(ids) <= max_tokens or len(logprobs) != len(ids),
            f"{counted(len(ids), 'token')} of at most {max_tokens:,}, with {len(logprobs):,} log-probabilities",
        ),
        (
            any(not 0 <= token < num_tokens for token in ids),
            f"a token that is not between 0 and {num_tokens - 1:,}",
        ),
        (
            any(not math.isfinite(value) or value > _ROUNDING for value in logprobs),
            "a log-probability that is not a finite number up to 0",
        ),
        prefix="vLLM answered with ",
        code=ErrorCode.PROTOCOL_MISMATCH,
        remedy="see its log; does it serve the trained model, by a tested release of vLLM?",
    )
