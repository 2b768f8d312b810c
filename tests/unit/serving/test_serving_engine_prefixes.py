"""A shared prefix is prefilled once, for the same user, variant and key only."""

from __future__ import annotations

from typing import Any

from gym_fed.config.serving import EngineConfig
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import CompletionOutput, GenerationRequest, SamplingParams
from tests.support.toy_engine import ToyModel, ToySource
from tests.support.wait import SECONDS

SYSTEM = [number % 200 for number in range(3, 53)]
"""50 tokens: three full blocks."""


def ask(
    engine: Engine, last: int, user: str = "u", variant: str | None = None, tokens: int = 6, key: str = ""
) -> CompletionOutput:
    sampling = SamplingParams(max_tokens=tokens, seed=last, ignore_eos=True)
    return engine.submit(GenerationRequest([*SYSTEM, last], sampling, variant, user, key)).result(SECONDS)


def test_a_beginning_is_found_by_the_same_user_and_variant_alone(tokenizer: Any) -> None:
    source = ToySource("alice", "bob")
    with Engine(ToyModel(), tokenizer, source) as engine:
        assert ask(engine, 1).cached_tokens == 0
        assert ask(engine, 2).cached_tokens == 48
        assert ask(engine, 2, user="other").cached_tokens == 0
        assert ask(engine, 2, variant="alice").cached_tokens == 0
        assert ask(engine, 3, variant="bob").cached_tokens == 0
        assert ask(engine, 3, variant="alice").cached_tokens == 48
        stats = engine.stats()
    assert (stats.cached_tokens, stats.prompt_tokens) == (96, 6 * 51 - 96)
    assert stats.kv_bytes_used == 0


def test_a_key_that_was_made_again_under_a_name_finds_nothing_of_its_predecessor(tokenizer: Any) -> None:
    prompt, sampling = [*SYSTEM, 1], SamplingParams(max_tokens=6, ignore_eos=True)
    with Engine(ToyModel(), tokenizer) as engine:
        found = [
            engine.submit(GenerationRequest(prompt, sampling, user="ann", key_digest=digest)).result(SECONDS)
            for digest in ("first", "first", "second", "second")
        ]
    assert [one.cached_tokens for one in found] == [0, 48, 0, 48]


def test_variants_that_share_a_file_in_memory_share_no_beginnings(tokenizer: Any) -> None:
    source = ToySource("alice")
    source.variants["bob"] = source.variants["alice"]  # as the store hands out copies of one file
    with Engine(ToyModel(), tokenizer, source) as engine:
        found = [ask(engine, 1, variant=name) for name in ("alice", "bob", "alice", "bob")]
    assert [one.cached_tokens for one in found] == [0, 0, 48, 48]
    assert len({tuple(one.token_ids) for one in found}) == 1


def test_a_cache_key_parts_requests_of_one_user(tokenizer: Any) -> None:
    with Engine(ToyModel(), tokenizer) as engine:
        found = [ask(engine, 1, key=key).cached_tokens for key in ("", "a", "b", "a", "")]
    assert found == [0, 0, 0, 48, 48]


def test_a_shared_cache_is_of_all_users_but_of_one_variant_and_key(tokenizer: Any) -> None:
    config = EngineConfig(prefix_cache="shared")
    with Engine(ToyModel(), tokenizer, ToySource("alice"), config) as engine:
        assert ask(engine, 1, user="a").cached_tokens == 0
        assert ask(engine, 2, user="b").cached_tokens == 48
        assert ask(engine, 2, user="b", variant="alice").cached_tokens == 0
        assert ask(engine, 2, user="c", variant="alice").cached_tokens == 48
        assert ask(engine, 2, user="b", key="own").cached_tokens == 0
        assert ask(engine, 2, user="b", key="own").cached_tokens == 48


def test_answers_are_those_without_a_prefix_cache(tokenizer: Any) -> None:
    found = []
    for on in (True, False):
        with Engine(ToyModel(), tokenizer, ToySource("alice"), EngineConfig(prefix_cache=on)) as engine:
            found.append(
                [ask(engine, last, variant=name).token_ids for last in (1, 2, 1) for name in (None, "alice")]
            )
            assert (engine.stats().cached_tokens > 0) == on
    assert found[0] == found[1]


def test_the_next_message_of_a_chat_finds_the_last_answer_too(tokenizer: Any) -> None:
    toy = ToyModel()
    with Engine(toy, tokenizer) as engine:
        first = ask(engine, 1, tokens=40)
        ids = [*SYSTEM, 1, *first.token_ids, 9, 9]
        second = engine.submit(GenerationRequest(ids, SamplingParams(max_tokens=2, seed=1), user="u"))
        assert second.result(SECONDS).cached_tokens == (51 + 39) // 16 * 16
    fresh = ToyModel()
    with Engine(fresh, tokenizer) as engine:
        alone = engine.submit(GenerationRequest(ids, SamplingParams(max_tokens=2, seed=1), user="u"))
        assert alone.result(SECONDS).token_ids == second.result(SECONDS).token_ids


def test_what_the_prefix_cache_keeps_makes_way_for_requests(tokenizer: Any) -> None:
    toy = ToyModel()
    config = EngineConfig(kv_cache_size=toy.bytes_per_token * 16 * 5)
    with Engine(toy, tokenizer, config=config) as engine:
        for user in "abcd":
            assert ask(engine, 1, user=user).cached_tokens == 0  # 4 of 5 blocks each
        assert ask(engine, 2, user="d").cached_tokens == 48
        assert engine.stats().preemptions == 0


def test_an_embedding_is_of_all_its_tokens_after_an_answer_to_the_same_text(tokenizer: Any) -> None:
    import torch

    toy = ToyModel()
    with Engine(toy, tokenizer) as engine:
        ask(engine, 1)
        found = engine.embed([*SYSTEM, 1], user="u").result(SECONDS)
    assert torch.allclose(found, toy.embed([*SYSTEM, 1], None), atol=1e-6)
