"""Admission, fairness and preemption of requests, and the effect of one request's end on others."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gym_fed.config.serving import EngineConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import Generation, GenerationRequest, SamplingParams
from gym_fed.serving.engine.scheduler import FairQueue, Scheduler, TokenCounters
from gym_fed.serving.engine.sequence import ScheduledRequest
from tests.support.toy_engine import ToyModel, ToyPool, ToySource
from tests.support.wait import SECONDS


def ask(user: str = "", variant: str | None = None, tokens: int = 4, prompt: int = 2) -> GenerationRequest:
    return GenerationRequest([7] * prompt, SamplingParams(max_tokens=tokens, seed=1), variant, user)


def refused(call: Callable[[], Any]) -> GymError:
    with pytest.raises(GymError) as caught:
        call()
    return caught.value


def test_a_user_with_many_requests_delays_another_by_no_more_than_one(tokenizer: Any) -> None:
    toy, order = ToyModel(), []
    config = EngineConfig(max_concurrent=1, max_queued=300, max_queued_per_user=300)
    with Engine(toy, tokenizer, config=config) as engine:
        toy.gate.clear()
        many = [engine.submit(ask("many")) for _ in range(200)]
        assert toy.entered.acquire(timeout=SECONDS)
        few = [engine.submit(ask("few")) for _ in range(3)]
        for generation in many + few:
            put = generation._put

            def noted(
                event: Any, whole: Any = None, put: Any = put, user: str = generation.request.user
            ) -> None:
                if whole is not None:
                    order.append(user)
                put(event, whole)

            generation._put = noted  # type: ignore[method-assign]
        toy.gate.set()
        few[-1].result(SECONDS)
    assert order[:6] == ["many", "few", "many", "few", "many", "few"]


def test_tokens_decide_whose_turn_it_is_and_absence_earns_none() -> None:
    class Job:
        def __init__(self, user: str) -> None:
            self.user = user

    counters = TokenCounters()
    queue = FairQueue(counters)
    jobs = [Job("a"), Job("a"), Job("b")]
    for job in jobs:
        counters.arrive(job.user)
        queue.put(job)
    counters.charge("a", 10)
    assert list(queue.by_priority()) == [jobs[2], jobs[0], jobs[1]]
    counters.charge("b", 30)
    late = Job("c")
    counters.arrive("c")
    queue.put(late)
    assert counters.served("c") == 10
    counters.running["a"] += 1  # as much served, but c has nothing running
    assert [job.user for job in queue.by_priority()] == ["c", "a", "a", "b"]
    assert queue.remove(late)
    assert not queue.remove(late)
    assert (len(queue), queue.count("a"), queue.count("c")) == (3, 2, 0)


def test_one_more_than_may_wait_is_refused_with_the_seconds_to_wait(tokenizer: Any) -> None:
    toy = ToyModel()
    config = EngineConfig(max_concurrent=1, max_queued=3, max_queued_per_user=2)
    with Engine(toy, tokenizer, config=config) as engine:
        toy.gate.clear()
        requested = [engine.submit(ask("a"))]
        assert toy.entered.acquire(timeout=SECONDS)
        requested += [engine.submit(ask("a")) for _ in range(2)]
        own = refused(lambda: engine.submit(ask("a")))
        requested.append(engine.submit(ask("b")))
        more = refused(lambda: engine.submit(ask("c")))
        assert own.code is more.code is ErrorCode.BUSY
        assert (own.message, more.message) == (
            "too many waiting requests of this user: 2",
            "too many waiting requests: 3",
        )
        assert f"try again in {engine.retry_after_seconds()} second" in more.hint
        toy.gate.set()
        assert all(len(one.result(SECONDS).token_ids) == 4 for one in requested)
        assert engine.stats().refused == 2
        assert engine.submit(ask("c")).result(SECONDS).finish_reason == "length"


def test_a_cancelled_answer_frees_its_place_within_a_step(tokenizer: Any) -> None:
    toy, source = ToyModel(), ToySource("alice")
    with Engine(toy, tokenizer, source, EngineConfig(max_concurrent=1)) as engine:
        toy.gate.clear()
        first = engine.submit(ask(variant="alice", tokens=200))
        assert toy.entered.acquire(timeout=SECONDS)
        waits = engine.submit(ask(tokens=200))
        next_one = engine.submit(ask(tokens=3, prompt=9))
        waits.cancel()
        first.cancel()
        toy.gate.set()
        assert waits.result(SECONDS).finish_reason == "cancelled"
        found = first.result(SECONDS)
        assert found.finish_reason == "cancelled"
        assert len(found.token_ids) == 1
        assert next_one.result(SECONDS).finish_reason == "length"
        first.cancel()  # nothing to do any more
        assert engine.stats().finished == {"stop": 0, "length": 1, "cancelled": 2, "error": 0}
    assert toy.steps[1] == [(9, True)]  # the step after the one that was under way
    assert not +source.pins


def test_a_variant_on_its_way_or_broken_holds_up_no_one_else(tokenizer: Any) -> None:
    toy, source = ToyModel(), ToySource("cold", "broken", "warm")
    source.cold.add("cold")
    source.broken.add("broken")
    with Engine(toy, tokenizer, source, EngineConfig(max_concurrent=1)) as engine:
        cold = engine.submit(ask("a", "cold"))
        broken = engine.submit(ask("a", "broken"))
        others = [engine.submit(ask("a", "warm")), engine.submit(ask("b"))]
        assert [one.result(SECONDS).finish_reason for one in others] == ["length", "length"]
        assert refused(lambda: broken.result(SECONDS)).code is ErrorCode.HASH_MISMATCH
        assert refused(lambda: list(broken)).code is ErrorCode.HASH_MISMATCH
        assert not cold.done
        source.cold.clear()
        assert cold.result(SECONDS).finish_reason == "length"
        assert refused(lambda: engine.submit(ask(variant="none"))).code is ErrorCode.NOT_FOUND
    assert not +source.pins


def test_a_variant_for_which_there_is_no_room_is_not_passed_for_ever(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(generation: Generation) -> None:
        """Another one before this one has ended, so that the first variant never is without use."""
        if not other.done and len(requested) < 60:
            requested.append(engine.submit(ask("a", "first", tokens=200)))
        assert generation.result(SECONDS).token_ids

    monkeypatch.setattr("gym_fed.serving.engine.admission._BYPASS_TIMEOUT_SECONDS", 0.0)
    source = ToySource("first", "second")
    source.no_room.add("second")
    config = EngineConfig(max_concurrent=2)
    with Engine(ToyModel(), tokenizer, source, config) as engine:
        requested = [
            engine.submit(ask("a", "first", tokens=200)),
            engine.submit(ask("a", "first", tokens=20)),
        ]
        other = engine.submit(ask("b", "second"))
        for generation in requested:
            follow(generation)
        assert other.result(SECONDS).finish_reason == "length"
    assert len(requested) < 60
    assert not +source.pins


def test_a_variant_for_which_there_is_no_room_is_passed_until_it_has_waited_long_enough(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.serving.engine.admission._BYPASS_TIMEOUT_SECONDS", 60.0)
    toy, source = ToyModel(), ToySource("first", "second")
    source.no_room.add("second")
    toy.gate.clear()
    with Engine(toy, tokenizer, source, EngineConfig(max_concurrent=2)) as engine:
        requested = [engine.submit(ask("a", "first", tokens=20))]
        assert toy.entered.acquire(timeout=20)
        requested += [engine.submit(ask("b", "second")), engine.submit(ask("a", "first", tokens=2))]
        toy.gate.set()
        assert all(generation.result(20).token_ids for generation in requested)
    assert any(len(step) == 2 for step in toy.steps[:20])


def test_requests_beyond_the_kv_cache_wait_and_one_that_never_fits_is_refused(tokenizer: Any) -> None:
    toy = ToyModel()
    config = EngineConfig(kv_cache_size=toy.bytes_per_token * 100, max_concurrent=8)  # 6 blocks: 96 tokens
    with Engine(toy, tokenizer, config=config) as engine:
        toy.gate.clear()
        first = engine.submit(ask("a", prompt=60, tokens=4))  # 4 blocks
        assert toy.entered.acquire(timeout=SECONDS)
        large = engine.submit(ask("b", prompt=40, tokens=8))  # 3 blocks: 2 are left
        small = [
            engine.submit(ask("a", prompt=2, tokens=2)) for _ in range(3)
        ]  # not before b's, who had nothing yet
        toy.gate.set()
        assert all(one.result(SECONDS).finish_reason == "length" for one in [first, large, *small])
        stats = engine.stats()
        assert (stats.kv_bytes_used, stats.preemptions) == (0, 0)
        never = refused(lambda: engine.submit(ask(prompt=2, tokens=95)))
        assert never.code is ErrorCode.TOO_LARGE
        assert f"{97 * toy.bytes_per_token:,} bytes" in never.message
        assert refused(lambda: engine.submit(ask(prompt=97, tokens=1))).code is ErrorCode.TOO_LARGE
    prefill = [sorted(tokens for tokens, _ in step if tokens > 1) for step in toy.steps]
    assert [found for found in prefill if found] == [[60], [2, 2, 2, 40]]


def test_four_clients_without_max_tokens_run_at_once(tokenizer: Any) -> None:
    toy = ToyModel(context=256)
    config = EngineConfig(kv_cache_size=toy.bytes_per_token * 256)
    with Engine(toy, tokenizer, config=config) as engine:
        toy.gate.clear()
        sampling = SamplingParams(seed=3, temperature=2.0)
        requested = [engine.submit(GenerationRequest([7, n], sampling, user=f"u{n}")) for n in range(4)]
        toy.gate.set()
        together = [one.result(SECONDS) for one in requested]
        alone = [engine.submit(one.request).result(SECONDS) for one in requested]
    assert any(len(step) == 4 for step in toy.steps)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_answer_goes_on_with_the_tokens_that_it_has_alone(
    tokenizer: Any, prefix_cache: bool
) -> None:
    source = ToySource("alice", "bob")
    wanted = [
        GenerationRequest(
            [number * 7 + place for place in range(9 + 5 * number)],
            SamplingParams(
                max_tokens=70,
                seed=number,
                temperature=0.0 if number % 3 == 0 else 1.0,
                frequency_penalty=0.5 * (number % 2),
                repetition_penalty=1.2 if number % 4 == 0 else 1.0,
                ignore_eos=True,
                logprobs=1,
            ),
            (None, "alice", "bob")[number % 3],
            f"u{number % 2}",
        )
        for number in range(7)
    ]
    with Engine(ToyModel(), tokenizer, source) as engine:
        alone = [engine.submit(request).result(SECONDS) for request in wanted]
    toy = ToyModel()
    # 12 blocks; the seven want 5 to 7 each.
    config = EngineConfig(kv_cache_size=toy.bytes_per_token * 16 * 12, prefix_cache=prefix_cache)
    with Engine(toy, tokenizer, source, config) as engine:
        generations = engine.submit_all([request for request in wanted if request.user == "u0"])
        generations += engine.submit_all([request for request in wanted if request.user == "u1"])
        reads = engine.embed([n % 250 for n in range(100)], "alice", "u1")
        together = {id(one.request): one.result(SECONDS) for one in generations}
        assert torch.allclose(
            reads.result(SECONDS),
            toy.embed([n % 250 for n in range(100)], source.variants["alice"]),
            atol=1e-5,
        )
        stats = engine.stats()
        assert engine._loop._tokens._present == Counter()
    for request, one in zip(wanted, alone, strict=True):
        found = together[id(request)]
        assert (found.token_ids, found.text) == (one.token_ids, one.text)
        assert [logprob.token_id for logprob in found.logprobs] == list(found.token_ids)
    assert stats.preemptions > 0
    assert stats.kv_bytes_used == 0
    assert toy.pool.free_blocks == 12
    assert not +source.pins


def test_the_newest_of_the_user_with_most_blocks_is_preempted_and_never_the_oldest_of_all() -> None:
    pool, running = ToyPool(), []
    for arrival, (user, blocks) in enumerate([("a", 9), ("b", 2), ("b", 2), ("c", 3)], 1):
        request = ScheduledRequest(user, None, [1])
        request.arrival, request.cache = arrival, pool.new_cache()
        assert request.cache.reserve(16 * blocks)
        running.append(request)
    scheduler = Scheduler(EngineConfig(), TokenCounters(), running.remove)
    scheduler.running = running[::-1]
    chosen = []
    while (victim := scheduler._victim()) is not None:
        scheduler.running.remove(victim)
        chosen.append((victim.user, victim.arrival))
    assert chosen == [("b", 3), ("c", 4), ("b", 2)]


def test_a_preempted_json_answer_is_the_one_given_alone(tokenizer: Any) -> None:
    schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 30}'
    wanted = [
        GenerationRequest(
            [number + 3] * 5,
            SamplingParams(max_tokens=90, seed=number, json_schema=schema),
            user=f"u{number}",
        )
        for number in range(3)
    ]
    with Engine(ToyModel(), tokenizer) as engine:
        alone = [engine.submit(request).result(SECONDS).text for request in wanted]
    toy = ToyModel()
    with Engine(toy, tokenizer, config=EngineConfig(kv_cache_size=toy.bytes_per_token * 16 * 7)) as engine:
        generations = [engine.submit(request) for request in wanted]
        assert [one.result(SECONDS).text for one in generations] == alone
        assert engine.stats().preemptions > 0


def test_cancelling_a_preempted_request_frees_its_variant(tokenizer: Any) -> None:
    toy, source = ToyModel(), ToySource("alice", "bob")

    def cancel(_chunks: Any) -> None:
        if engine.stats().preemptions and not pins:
            pins.update(source.pins)
            requested[1].cancel()

    pins: Counter[str] = Counter()
    config = EngineConfig(kv_cache_size=toy.bytes_per_token * 16 * 8)
    with Engine(toy, tokenizer, source, config) as engine:
        toy.gate.clear()
        requested = [engine.submit(ask("a", name, tokens=100, prompt=20)) for name in ("alice", "bob")]
        toy.fail = cancel
        toy.gate.set()
        assert requested[1].result(SECONDS).finish_reason == "cancelled"
        assert requested[0].result(SECONDS).token_ids
        assert engine.stats().preemptions == 1
    assert pins == {"alice": 1, "bob": 1}  # a preempted request keeps its variant
    assert not +source.pins


def test_only_the_request_that_breaks_a_step_fails(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    toy, source = ToyModel(), ToySource("bad", "good")

    def fail(chunks: Any) -> None:
        if any(chunk.variant is not None and chunk.variant.name == "bad" for chunk in chunks):
            raise RuntimeError("the shapes do not fit")

    toy.fail = fail
    with Engine(toy, tokenizer, source) as engine, caplog.at_level(logging.ERROR, "gym_fed"):
        toy.gate.clear()
        good = engine.submit(ask(variant="good", tokens=6))
        assert toy.entered.acquire(timeout=SECONDS)
        bad = [engine.submit(ask(variant="bad")) for _ in range(3)]
        toy.gate.set()
        errors = [refused(lambda one=one: one.result(SECONDS)) for one in bad]  # type: ignore[misc]
        assert {error.code for error in errors} == {ErrorCode.INTERNAL}
        assert len(good.result(SECONDS).token_ids) == 6
        assert "the shapes do not fit" in caplog.text
        assert engine.healthy
        for _ in range(3):
            refused(engine.submit(ask(variant="bad")).result)
        assert not engine.healthy
        assert engine.submit(ask(variant="good")).result(SECONDS).finish_reason == "length"
        assert engine.healthy
        assert engine.stats().finished["error"] == 6
    assert not +source.pins


def test_what_breaks_the_loop_fails_all_and_later_requests_too(tokenizer: Any) -> None:
    toy, source = ToyModel(), ToySource("alice")
    engine = Engine(toy, tokenizer, source)
    toy.gate.clear()
    running = engine.submit(ask(variant="alice"))
    assert toy.entered.acquire(timeout=SECONDS)

    def broken(_work: Any) -> None:
        raise ZeroDivisionError

    engine._loop.put = broken  # type: ignore[method-assign]
    waiting = engine.submit(ask())
    toy.gate.set()
    for generation in (running, waiting):
        assert refused(lambda one=generation: one.result(SECONDS)).code is ErrorCode.INTERNAL  # type: ignore[misc]
    assert refused(lambda: engine.submit(ask())).code is ErrorCode.INTERNAL
    assert not engine.healthy
    engine.close()
    assert not +source.pins


def test_closing_ends_everything_as_cancelled_and_takes_nothing_more(tokenizer: Any) -> None:
    toy, source = ToyModel(), ToySource("alice", "cold")
    source.cold.add("cold")
    engine = Engine(toy, tokenizer, source, EngineConfig(max_concurrent=1))
    requested = [engine.submit(ask(variant=name, tokens=250)) for name in ("alice", "cold", None)]
    assert toy.entered.acquire(timeout=SECONDS)
    assert engine.healthy
    engine.close()
    assert {one.result(0).finish_reason for one in requested} == {"cancelled"}
    assert [event.finish_reason for event in requested[2]] == ["cancelled"]
    assert refused(lambda: engine.submit(ask())).code is ErrorCode.UNAVAILABLE
    assert not engine.healthy
    engine.close()  # again changes nothing
    assert not +source.pins


def test_an_answer_that_takes_too_long_to_wait_for_goes_on(tokenizer: Any) -> None:
    toy = ToyModel()
    with Engine(toy, tokenizer) as engine:
        toy.gate.clear()
        generation = engine.submit(ask())
        assert refused(lambda: generation.result(0.01)).code is ErrorCode.DEADLINE_EXCEEDED
        cancelled = engine.embed([1])
        assert refused(lambda: cancelled.result(0.01)).code is ErrorCode.DEADLINE_EXCEEDED
        cancelled.cancel()
        toy.gate.set()
        assert generation.result(SECONDS).finish_reason == "length"
        assert refused(cancelled.result).code is ErrorCode.UNAVAILABLE
        assert engine.embed([1]).result(SECONDS).shape == (24,)
        assert engine.stats().embeddings == 1  # the other was cancelled before it ran
        assert engine.stats().queued == 0


def test_the_counts_add_up(tokenizer: Any) -> None:
    source = ToySource("alice")
    with Engine(ToyModel(), tokenizer, source) as engine:
        for variant in ("alice", None, None):
            engine.submit(ask(variant=variant, tokens=4, prompt=5)).result(SECONDS)
        stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (15, 12)
    assert (stats.rows, stats.rows_with_variants, stats.steps) == (12, 4, 12)
    assert (stats.first_token.count, stats.per_token.count) == (3, 9)
    assert stats.first_token.sum > 0
    assert len(stats.first_token.counts) == len(stats.first_token.bounds) + 1
    assert stats.busy_seconds >= stats.model_seconds > 0
    assert (stats.running, stats.queued) == (0, 0)


def test_nothing_is_left_behind_when_many_come_and_go_at_once(tokenizer: Any) -> None:
    toy, source = ToyModel(), ToySource("a", "b", "cold", "broken")
    source.cold.add("cold")
    source.broken.add("broken")
    ended: Counter[str] = Counter()
    config = EngineConfig(max_concurrent=5, max_queued=20, max_queued_per_user=6, max_batch_tokens=16)

    def user(number: int) -> None:
        chance = random.Random(number)
        for _ in range(25):
            variant = chance.choice([None, "a", "b", "cold", "broken"])
            try:
                if chance.random() < 0.1:
                    engine.embed([1, 2], chance.choice([None, "a"]), f"u{number}").result(SECONDS)
                    ended["embedded"] += 1
                    continue
                requested = ask(
                    f"u{number}", variant, tokens=chance.randint(1, 9), prompt=chance.randint(1, 30)
                )
                generation = engine.submit(requested)
                if variant == "cold" or chance.random() < 0.3:
                    generation.cancel()
                ended[generation.result(SECONDS).finish_reason] += 1
            except GymError as error:
                ended[error.code.value] += 1

    with Engine(toy, tokenizer, source, config) as engine:
        threads = [threading.Thread(target=user, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        stats = engine.stats()
        assert engine._loop._tokens._present == Counter()
    assert sum(ended.values()) == 200
    assert set(ended) <= {"length", "stop", "cancelled", "embedded", "busy", "hash-mismatch"}
    assert min(ended["length"], ended["cancelled"], ended["embedded"], ended["hash-mismatch"]) > 0
    assert (stats.running, stats.queued, stats.kv_bytes_used) == (0, 0, 0)
    assert not +source.pins


def test_a_variant_that_takes_long_to_load_is_passed_all_the_while(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.serving.engine.admission._BYPASS_TIMEOUT_SECONDS", 0.0)
    source = ToySource("slow", "warm")
    source.cold.add("slow")
    with Engine(ToyModel(), tokenizer, source, EngineConfig(max_concurrent=1)) as engine:
        slow = engine.submit(ask("a", "slow"))
        for _ in range(3):
            assert engine.submit(ask("b", "warm")).result(SECONDS).finish_reason == "length"
        assert not slow.done
        source.cold.clear()
        assert slow.result(SECONDS).finish_reason == "length"


def test_whatever_breaks_at_the_end_of_a_request_nobody_waits_for_ever(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(ToySource):
        def release(self, variant: Any) -> None:
            raise RuntimeError("this source lets nothing go")

    with Engine(ToyModel(), tokenizer, Stuck("alice")) as engine:
        requested = [engine.submit(ask(variant=name)) for name in ("alice", None)]
        assert [one.result(SECONDS).finish_reason for one in requested] == ["length", "length"]
        assert engine.embed([1, 2], "alice").result(SECONDS).shape == (24,)
        assert "lets nothing go" in caplog.text

        stream = engine.vocabularies.base.decoder.stream([1])
        monkeypatch.setattr(stream, "push", lambda _token: 1 / 0)
        with monkeypatch.context() as patch:
            patch.setattr(engine.vocabularies.base.decoder, "stream", lambda *_, **_more: stream)
            broken = engine.submit(ask(tokens=200))
        assert refused(lambda: broken.result(SECONDS)).code is ErrorCode.INTERNAL
        assert engine.submit(ask()).result(SECONDS).finish_reason == "length"
        ends = engine._loop._end

        def fails(work: Any, reason: Any) -> None:
            ends(work, reason)
            raise ZeroDivisionError

        engine._loop._end = fails  # type: ignore[method-assign]
        assert refused(lambda: engine.submit(ask()).result(SECONDS)).code is ErrorCode.INTERNAL
        assert refused(lambda: engine.embed([1]).result(SECONDS)).code is ErrorCode.INTERNAL
        last = engine.submit(ask(tokens=250))
    assert refused(lambda: last.result(SECONDS)).code is ErrorCode.INTERNAL


def test_embeddings_are_read_in_pieces_beside_answers_and_keep_the_kv_budget(tokenizer: Any) -> None:
    toy = ToyModel()
    config = EngineConfig(
        max_batch_tokens=16, kv_cache_size=toy.bytes_per_token * 160, max_queued_per_user=2, step_stretch=None
    )
    ids = [n % 250 for n in range(100)]
    with Engine(toy, tokenizer, config=config) as engine:
        toy.gate.clear()
        answer = engine.submit(ask(tokens=30))
        assert toy.entered.acquire(timeout=SECONDS)
        first, second, dropped = (engine.embed(ids, user="e") for _ in range(3))
        dropped.cancel()
        toy.gate.set()
        assert answer.result(SECONDS).finish_reason == "length"
        alone = toy.embed(ids, None)
        assert torch.allclose(first.result(SECONDS), alone, atol=1e-6)
        assert torch.allclose(second.result(SECONDS), alone, atol=1e-6)
        assert refused(dropped.result).code is ErrorCode.UNAVAILABLE
        assert refused(lambda: engine.embed([1] * 161)).code is ErrorCode.TOO_LARGE
        stats = engine.stats()
    assert max(sum(tokens for tokens, _ in step) for step in toy.steps) == 16
    assert any((1, True) in step and len(step) == 2 for step in toy.steps)
    # Two texts of 100 tokens never had caches at once: 160 are allowed.
    assert not any(sum(not wants for _, wants in step) > 1 for step in toy.steps)
    assert (stats.embeddings, stats.kv_bytes_used) == (2, 0)
    assert stats.prompt_tokens == 202


async def test_an_embedding_that_nobody_awaits_any_more_is_cancelled(tokenizer: Any) -> None:
    toy = ToyModel()
    with Engine(toy, tokenizer, config=EngineConfig(max_batch_tokens=16)) as engine:
        toy.gate.clear()
        waiting = asyncio.create_task(engine.embed([1] * 200).result_async())
        while not toy.steps and not toy.entered.acquire(blocking=False):
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        toy.gate.set()
        assert (await engine.embed([1, 2]).result_async()).shape == (24,)
        assert engine.stats().finished["cancelled"] == 1
    assert len(toy.steps) <= 3


def test_an_idle_engine_holds_no_variant(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_fed.serving.engine.engine._IDLE_SECONDS", 0.001)
    toy = ToyModel()
    released = threading.Event()
    toy.release_variants = released.set  # type: ignore[method-assign]
    with Engine(toy, tokenizer, ToySource("alice")) as engine:
        engine.submit(ask(variant="alice")).result(SECONDS)
        assert released.wait(SECONDS)
