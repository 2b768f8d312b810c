"""Speculative decoding by n-grams changes how many steps an answer takes, and not the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.serving import EngineConfig
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.proposals import NgramProposer
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from tests.support.toy_engine import ToyModel, ToySource
from tests.support.wait import SECONDS

SPECULATIVE = EngineConfig(speculative="ngram", speculative_tokens=5)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    ids = [1, 2, 3, 4, 5, 9, 9, 2, 3]
    proposer = NgramProposer(ids, 4)
    assert proposer.propose(4) == [4, 5, 9, 9]
    assert proposer.propose(2) == [4, 5]
    assert proposer.propose(0) == []
    ids.append(7)
    assert proposer.propose(4) == []
    ids += [2, 3, 4, 6, 0, 2, 3]
    assert proposer.propose(4) == [4, 6, 0, 2]  # the last occurrence of the longest n-gram


def test_a_repetition_is_proposed_to_go_on() -> None:
    assert NgramProposer([5, 6, 5, 6, 5, 6], 5).propose(5) == [5, 6, 5, 6, 5]


def test_fewer_tokens_are_proposed_after_wrong_ones_and_more_after_right_ones() -> None:
    proposer = NgramProposer([5, 6] * 10, 8)
    assert len(proposer.propose(8)) == 8
    proposer.observe(8, 3)
    assert len(proposer.propose(8)) == 3
    proposer.observe(3, 0)
    assert len(proposer.propose(8)) == 1
    proposer.observe(1, 1)
    assert len(proposer.propose(8)) == 2


def repetitive(number: int, variants: tuple[str | None, ...]) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=30 + number,
        temperature=(0.0, 0.7, 1.0)[number % 3],
        top_p=0.9 if number % 2 else 1.0,
        frequency_penalty=0.3 if number % 5 == 0 else 0.0,
        repetition_penalty=1.1 if number % 4 == 0 else 1.0,
        logprobs=2 if number % 2 else None,
        seed=number,
        ignore_eos=True,
    )
    return GenerationRequest(
        [7, 8, 9, number] * 6, sampling, variants[number % len(variants)], f"u{number % 3}"
    )


@pytest.mark.parametrize("blocks", [400, 14])
def test_greedy_and_seeded_answers_are_those_without_proposals(tokenizer: Any, blocks: int) -> None:
    source = ToySource("alice", "bob")
    wanted = [repetitive(number, (None, "alice", "bob")) for number in range(9)]
    with Engine(ToyModel(), tokenizer, source) as engine:
        plain = [engine.submit(request).result(SECONDS) for request in wanted]
    toy = ToyModel()
    size = {"kv_cache_size": toy.bytes_per_token * 16 * blocks}
    with Engine(toy, tokenizer, source, SPECULATIVE.model_copy(update=size)) as engine:
        generations = [engine.submit(request) for request in wanted]
        found = [generation.result(SECONDS) for generation in generations]
        stats = engine.stats()
    for one, other in zip(found, plain, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )
        assert one.logprobs == other.logprobs
    assert 0 < stats.accepted_tokens < stats.proposed_tokens
    assert stats.generated_tokens == sum(len(one.token_ids) for one in found)
    assert (stats.preemptions > 0) == (blocks == 14)
    assert toy.pool.free_blocks == blocks
    assert not +source.pins


def test_a_real_model_takes_fewer_steps_for_the_same_tokens(tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=256, **size)).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    wanted = [
        GenerationRequest(
            [5, 6, 7, number] * 5,
            SamplingParams(max_tokens=60, temperature=0.3 * (number % 2), seed=number, ignore_eos=True),
        )
        for number in range(4)
    ]
    with MultiVariantModel(model) as served:
        answers, steps = [], []
        for config in (EngineConfig(), SPECULATIVE):
            with Engine(served, tokenizer, config=config) as engine:
                answers.append([engine.submit(request).result(SECONDS).token_ids for request in wanted])
                steps.append(engine.stats().steps)
    assert answers[0] == answers[1]
    assert steps[1] < 0.9 * steps[0]


def test_guided_answers_and_stop_texts_end_where_they_do_without_proposals(tokenizer: Any) -> None:
    schema = '{"type": "array", "items": {"enum": [true]}, "minItems": 8, "maxItems": 12}'
    wanted = [
        GenerationRequest([3], SamplingParams(max_tokens=80, seed=1, json_schema=schema)),
        GenerationRequest([7, 8] * 9, SamplingParams(max_tokens=60, temperature=0, stop=("a", "e", "o"))),
    ]
    found = []
    for config in (EngineConfig(), SPECULATIVE):
        with Engine(ToyModel(), tokenizer, config=config) as engine:
            found.append([engine.submit(request).result(SECONDS) for request in wanted])
            accepted = engine.stats().accepted_tokens
    assert accepted > 10
    assert [(one.text, one.token_ids) for one in found[0]] == [(one.text, one.token_ids) for one in found[1]]


def test_answers_of_gym_nano_are_the_same(tokenizer: Any) -> None:
    loaded = load_model("gym-nano")
    ids = list(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Repeat: abc abc abc abc"}], add_generation_prompt=True
        )["input_ids"]
    )
    wanted = [
        GenerationRequest(ids, SamplingParams(max_tokens=20, temperature=heat, seed=2, ignore_eos=True))
        for heat in (0.0, 1.0)
    ]
    with MultiVariantModel(loaded.model) as served:
        found = []
        for config in (EngineConfig(), SPECULATIVE):
            with Engine(served, loaded.tokenizer, config=config) as engine:
                found.append([engine.submit(request).result(SECONDS).token_ids for request in wanted])
    assert found[0] == found[1]
