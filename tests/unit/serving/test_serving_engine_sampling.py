"""Sampling: every parameter does what its definition says, for its own row only."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.limits import Limits
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.engine.sampling import (
    Row,
    RowSampler,
    SampledToken,
    _best_by_torch,
    _draw,
    choose,
    noise_size,
    repetition_penalty,
    warpers,
)

VOCAB = 1000


def row(**params: Any) -> Row:
    return Row(RowSampler(SamplingParams(**params), [1, 2, 3]))


def pick(logits: torch.Tensor, *rows: Row) -> list[SampledToken]:
    return choose(logits.expand(len(rows), -1), rows)


def normal(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("settings", "warper"),
    [
        ((1.0, 0, 0.9, 0.0), TopPLogitsWarper(0.9)),
        ((1.0, 0, 0.3, 0.0), TopPLogitsWarper(0.3)),
        ((1.0, 0, 0.999, 0.0), TopPLogitsWarper(0.999)),  # wider than what is looked at first
        ((1.0, 0, 0.0, 0.0), TopPLogitsWarper(0.0)),
        ((0.7, 0, 1.0, 0.0), TemperatureLogitsWarper(0.7)),
        ((1.0, 7, 1.0, 0.0), TopKLogitsWarper(7)),
        ((1.0, 10 * VOCAB, 1.0, 0.0), TopKLogitsWarper(10 * VOCAB)),
        ((1.0, 0, 1.0, 0.05), MinPLogitsWarper(0.05)),
        ((1.0, 0, 1.0, 1.0), MinPLogitsWarper(1.0)),
    ],
)
def test_the_same_tokens_stay_as_in_transformers(settings: Any, warper: Any) -> None:
    logits = normal(6) * torch.tensor([0.2, 0.5, 1.0, 2.0, 4.0, 0.1])[:, None]
    found = logits
    for one in warpers(settings):
        found = one(found)
    assert torch.equal(found, warper(None, logits))


@pytest.mark.parametrize("width", [3, 100, 300])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9])
def test_a_nucleus_of_a_small_vocabulary_is_transformers(width: int, top_p: float) -> None:
    logits = normal(4)[:, :width]
    (warper,) = warpers((1.0, 0, top_p, 0.0))
    assert torch.equal(warper(logits), TopPLogitsWarper(top_p)(None, logits))


@pytest.mark.parametrize("width", [8, 300])
@pytest.mark.parametrize(
    ("settings", "warper"),
    [
        ((1.0, 2, 1.0, 0.0), TopKLogitsWarper(2)),  # three are second
        ((1.0, 0, 0.5, 0.0), TopPLogitsWarper(0.5)),  # one has just that
        ((1.0, 0, 0.75, 0.0), TopPLogitsWarper(0.75)),
        ((1.0, 0, 1.0, 0.25), MinPLogitsWarper(0.25)),
    ],
)
def test_equals_and_sums_on_the_bound_are_transformers(width: int, settings: Any, warper: Any) -> None:
    logits = torch.full((1, width), -math.inf)
    logits[0, [5, 2, 7, 1]] = torch.tensor([3.0, 1.0, 1.0, 1.0]).log() if settings[1] else 0.0
    if settings[2] < 1.0:
        logits[0, [2, 7, 1]] = torch.tensor([0.5, 0.25, 0.25]).log()
    (own,) = warpers(settings)
    assert torch.equal(own(logits), warper(None, logits))


def test_of_equally_likely_tokens_the_first_is_taken() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 400, 900]] = 2.0
    plain, shaped = pick(logits, row(temperature=0), row(temperature=0, logit_bias={7: -1.0}))
    assert (plain.token_id, shaped.token_id) == (7, 400)
    assert _best_by_torch(logits) == ([7], [2.0])


def test_a_bias_stays_when_the_penalty_of_its_token_grows() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler = row(temperature=0, logit_bias={4: 5.0}, presence_penalty=1.0)
    for _ in range(3):  # 5 - 1 is still more than 0
        assert pick(logits, sampler)[0].token_id == 4
        sampler.sampler.push(4)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_transformers_and_skips_ids_without_a_logit(penalty: float) -> None:
    logits, ids = normal(1), torch.tensor([0, 5, VOCAB - 1, VOCAB, VOCAB + 7])
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids[None], logits)[0]
    found = repetition_penalty(penalty, ids, logits[0])
    assert torch.equal(found, wanted)
    assert not torch.equal(found, logits[0])


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    shares = {3: 0.5, 127: 0.2, 128: 0.2, 999: 0.1}
    for token_id, share in shares.items():
        logits[0, token_id] = math.log(share)
    sampler = row(seed=1).sampler
    noise = torch.stack([sampler.noise(noise_size(VOCAB)) for _ in range(4000)])
    counts = Counter(_draw(logits.expand(4000, -1), noise))
    # four standard deviations of 4000 draws
    assert counts == {token_id: pytest.approx(share * 4000, abs=130) for token_id, share in shares.items()}
    level = torch.full((1, noise_size(VOCAB)), 1e-300, dtype=torch.float64)  # also what is out has as little
    assert _draw(logits, level) == [3]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.6}, {"top_k": 50}, {"min_p": 0.02, "temperature": 0.7}])
def test_the_rounding_of_another_batch_size_changes_no_draw(params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 20_000, generator=generator) * 4
    rounded = logits + torch.randn(60, 20_000, generator=generator) * 1e-4
    alone = [choose(one[None], [row(seed=n, **params)])[0] for n, one in enumerate(logits)]
    together = choose(rounded, [row(seed=n, **params) for n in range(60)])
    assert [one.token_id for one in alone] == [one.token_id for one in together]
    assert len({one.token_id for one in alone}) > 30


def test_a_seed_gives_the_same_tokens_alone_and_among_others() -> None:
    def tokens(rows: int, place: int) -> list[int]:
        samplers = [row(seed=9 if number == place else None, temperature=1.3) for number in range(rows)]
        return [pick(normal(seed=step), *samplers)[place].token_id for step in range(40)]

    alone = tokens(1, 0)
    assert alone == tokens(7, 4)
    assert len(set(alone)) > 5
    unseeded = [pick(normal(seed=1), row(temperature=5.0))[0].token_id for _ in range(20)]
    assert len(set(unseeded)) > 5


def test_rows_of_every_kind_in_one_batch_do_not_disturb_each_other() -> None:
    logits = normal()
    best = int(logits.argmax())
    kept = logits.clone()
    rows = [
        row(temperature=0),
        row(temperature=0, logit_bias={best: -1000.0}),
        row(temperature=1e-9, logprobs=2),
        row(seed=1, top_k=1),
        row(seed=1, logit_bias={5: 1000.0}),
    ]
    found = pick(logits, *rows)
    second = int(logits[0].topk(2).indices[1])
    assert [one.token_id for one in found] == [best, second, best, best, 5]
    assert [one.logprob is not None for one in found] == [False, False, True, False, False]
    assert torch.equal(logits, kept)


def test_penalties_are_openais_and_count_the_answer_only() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 10], logits[0, 11], logits[0, 12] = 4.0, 3.0, 2.0, 1.0
    frequent = row(temperature=0, frequency_penalty=0.6)
    present = row(temperature=0, presence_penalty=0.6)
    said: list[list[int]] = [[], []]
    for _ in range(6):
        for one, choice in enumerate(pick(logits, frequent, present)):
            said[one].append(choice.token_id)
            (frequent, present)[one].sampler.push(choice.token_id)
    # 4.0, 3.4, 2.8 < 3.0: each use costs; that token 1 is in the prompt costs nothing.
    assert said[0] == [1, 1, 10, 1, 10, 1]
    assert said[1] == [1, 1, 1, 1, 1, 1]
    present.sampler.push(1)
    logits[0, 1] = 3.5
    assert pick(logits, present)[0].token_id == 10


def test_the_repetition_penalty_counts_the_prompt_and_divides_or_multiplies() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 1], logits[0, 10] = 4.0, 3.0  # 1 is in the prompt: 4 / 2 < 3
    sampler = row(temperature=0, repetition_penalty=2.0)
    assert pick(logits, sampler)[0].token_id == 10
    sampler.sampler.push(10)  # 3 / 2 < 4 / 2
    assert pick(logits, sampler)[0].token_id == 1


def test_logits_that_are_no_numbers_fail_their_own_row() -> None:
    logits = normal(3)
    logits[1, 5] = math.nan
    found = choose(logits, [row(temperature=0), row(seed=1), row(seed=1)])
    assert [one.error is not None for one in found] == [False, True, False]
    assert found[1].error is not None
    assert found[1].error.code is ErrorCode.MODEL_INVALID
    nothing = pick(torch.zeros(1, 4), row(logit_bias=dict.fromkeys(range(4), -math.inf), seed=1))[0].error
    assert nothing is not None
    assert nothing.code is ErrorCode.DATA_INVALID


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": 101.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"stop": ("a", "")}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"seed": 1.5}, "seed"),
        ({"json_schema": "{}", "stop": ("a",)}, "json_schema"),
    ],
)
def test_a_parameter_that_is_off_is_refused_by_name(params: Any, message: str) -> None:
    limits = Limits(context=10, vocab_size=50, kv_bytes_per_token=1, kv_bytes=1000)
    with pytest.raises(GymError, match=message) as refused:
        limits.check_sampling(SamplingParams(**params))
    assert refused.value.code is ErrorCode.USAGE


def test_a_prompt_of_no_or_unknown_tokens_is_refused() -> None:
    limits = Limits(context=10, vocab_size=50, kv_bytes_per_token=1, kv_bytes=1000)
    for ids, message in (([], "empty"), ([1, 50], "token 50"), ([-1], "token -1")):
        with pytest.raises(GymError, match=message) as refused:
            limits.check_prompt(ids)
        assert refused.value.code is ErrorCode.USAGE
    assert limits.answer_tokens(GenerationRequest([1, 2, 3])) == 7
    tight = Limits(context=10, vocab_size=50, kv_bytes_per_token=2, kv_bytes=12)
    assert tight.answer_tokens(GenerationRequest([1, 2, 3])) == 3
    with pytest.raises(GymError, match="14 bytes") as refused:
        tight.answer_tokens(GenerationRequest([1] * 6))
    assert refused.value.code is ErrorCode.TOO_LARGE
