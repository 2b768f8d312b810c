"""Answers of a hostile or broken vLLM never reach the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import SamplingParams
from gym_fed.serving.engine.sampling import SampledLogprob
from gym_fed.serving.vllm.bodies import AnswerChunk
from gym_fed.serving.vllm.client import VllmAddress, VllmClient
from gym_fed.training.rollouts.client import RolloutClient
from gym_fed.training.rollouts.policy import RolloutPolicy

NUM_TOKENS, MAX_TOKENS = 100, 3
POLICY = RolloutPolicy("policy-1", 0, b"")


async def _nothing(*_: Any) -> None:
    pass


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutClient]:
    for name in ("load_adapter", "unload_adapter"):
        monkeypatch.setattr(VllmClient, name, _nothing)
    server: Any = SimpleNamespace(address=VllmAddress("http://127.0.0.1:9", None, ""), ready=True)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, logprobs=0)
    made = RolloutClient(server, sampling, frozenset([2]), NUM_TOKENS, 64, 5.0)
    yield made
    made.close()


def answer(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch, ids: list[int], logprobs: list[float]
) -> Any:
    async def complete(self: VllmClient, body: Any) -> AnswerChunk:
        return AnswerChunk(tuple(ids), tuple(SampledLogprob(value, ()) for value in logprobs), "stop")

    monkeypatch.setattr(VllmClient, "complete", complete)
    return client.submit(POLICY, [[5, 6]], [1]).result(30)


def test_an_answer_as_of_sampling_is_taken(client: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> None:
    (given,) = answer(client, monkeypatch, [0, NUM_TOKENS - 1], [-0.5, 1e-6])
    assert (given.token_ids, given.logprobs) == ([0, NUM_TOKENS - 1], [-0.5, 1e-6])


@pytest.mark.parametrize(
    ("ids", "logprobs", "named"),
    [
        ([1], [math.nan], "log-probability"),
        ([1], [-math.inf], "log-probability"),
        ([1], [0.5], "log-probability"),
        ([NUM_TOKENS], [-1.0], "a token that is not between 0 and 99"),
        ([-1], [-1.0], "a token that is not between 0 and 99"),
        ([1] * 4, [-1.0] * 4, "4 tokens of at most 3"),
        ([1, 1], [-1.0], "with 1 log-probabilities"),
        ([], [], "0 tokens"),
    ],
)
def test_an_answer_that_no_sampling_gives_ends_the_run(
    client: RolloutClient,
    monkeypatch: pytest.MonkeyPatch,
    ids: list[int],
    logprobs: list[float],
    named: str,
) -> None:
    with pytest.raises(GymError, match=named) as error:
        answer(client, monkeypatch, ids, logprobs)
    assert error.value.code is ErrorCode.PROTOCOL_MISMATCH
