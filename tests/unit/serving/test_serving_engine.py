"""The engine's answers equal the model's, whatever else is being answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.serving import EngineConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.request import (
    CompletionOutput,
    Event,
    Generation,
    GenerationRequest,
    SamplingParams,
)
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from tests.support.toy_engine import ToyModel, ToySource
from tests.support.variants import load, write_random_delta
from tests.support.wait import SECONDS

QUESTIONS = [
    "What is the capital of France?",
    "Reverse: abcdef",
    "Sort the letters: hello",
    "Uppercase: small",
]


@pytest.fixture(scope="module")
def nano() -> Iterator[Any]:
    loaded = load_model("gym-nano")
    with MultiVariantModel(loaded.model) as served:
        yield served, loaded.tokenizer


def chat(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return list(found["input_ids"])


def requests(count: int, variants: list[str | None]) -> list[GenerationRequest]:
    """Of different lengths, greedy and seeded, with penalties and without."""
    found = []
    for number in range(count):
        prompt = [(7 * number + 3 * place) % 256 for place in range(1 + 11 * number % 40)]
        sampling = SamplingParams(
            max_tokens=5 + number % 7 * 4,
            temperature=(0.0, 1.0, 0.8)[number % 3],
            top_p=0.9 if number % 2 else 1.0,
            frequency_penalty=0.5 if number % 5 == 0 else 0.0,
            repetition_penalty=1.2 if number % 4 == 0 else 1.0,
            logprobs=2,
            seed=number,
        )
        found.append(
            GenerationRequest(prompt, sampling, variants[number % len(variants)], f"user{number % 3}")
        )
    return found


def said(completion: CompletionOutput) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason


@pytest.mark.parametrize("batch_tokens", [16, 512])
def test_answers_among_others_are_those_given_alone(tokenizer: Any, batch_tokens: int) -> None:
    wanted = requests(24, [None, "alice", "bob"])
    source = ToySource("alice", "bob")
    alone = []
    with Engine(ToyModel(), tokenizer, source) as engine:
        for request in wanted:
            alone.append(engine.submit(request).result(SECONDS))
    toy = ToyModel()
    config = EngineConfig(max_concurrent=24, max_batch_tokens=batch_tokens, step_stretch=None)
    with Engine(toy, tokenizer, source, config) as engine:
        toy.pause_after = 4  # however slow this thread, nobody ends before the others are there
        first = [engine.submit(request) for request in wanted[:10]]
        for _ in range(5):
            assert toy.entered.acquire(timeout=SECONDS)
        rest = [engine.submit(request) for request in wanted[10:]]  # these join in the middle
        toy.gate.set()
        together = [generation.result(SECONDS) for generation in first + rest]
    assert [said(one) for one in together] == [said(one) for one in alone]
    assert max(len(step) for step in toy.steps) > 8
    assert max(sum(tokens for tokens, _ in step) for step in toy.steps) <= batch_tokens
    assert not +source.pins


def test_what_is_written_goes_on_while_a_long_prompt_is_read(tokenizer: Any) -> None:
    toy = ToyModel()
    with Engine(toy, tokenizer, config=EngineConfig(max_batch_tokens=16, step_stretch=None)) as engine:
        toy.gate.clear()
        short = engine.submit(GenerationRequest([5], SamplingParams(max_tokens=40, seed=1)))
        assert toy.entered.acquire(timeout=SECONDS)
        long = engine.submit(GenerationRequest(list(range(200)), SamplingParams(max_tokens=3, seed=1)))
        toy.gate.set()
        assert len(short.result(SECONDS).token_ids) == 40
        assert len(long.result(SECONDS).token_ids) == 3
    beside = [step for step in toy.steps if len(step) == 2 and step[1][0] > 1]
    assert beside[0] == [(1, True), (15, False)]
    assert sum(tokens for _, (tokens, _) in beside) == 200
    assert sum(wants for _, (_, wants) in beside) == 1


def test_greedy_answers_are_those_of_generate(nano: Any) -> None:
    served, tokenizer = nano
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    with Engine(served, tokenizer, config=EngineConfig(max_batch_tokens=32)) as engine:
        requested = [
            engine.submit(GenerationRequest(ids, SamplingParams(temperature=0, max_tokens=16)))
            for ids in prompts
        ]
        found = [generation.result(SECONDS) for generation in requested]
    stock = load_model("gym-nano").model
    for ids, completion in zip(prompts, found, strict=True):
        wanted = stock.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[
            0, len(ids) :
        ].tolist()
        assert list(completion.token_ids) == wanted
        assert completion.text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert found[0].text == "Paris"
    assert found[0].finish_reason == "stop"


@pytest.mark.shared
def test_a_model_with_two_end_tokens_and_word_pieces_is_continued_as_generate_does(
    shared_folder: Path,
) -> None:
    folder = str(shared_folder / "models" / "stories260K")
    loaded = load_model(folder)
    ids = loaded.tokenizer("Once upon a time, there was a")["input_ids"]
    wanted = loaded.model.generate(torch.tensor([ids]), max_new_tokens=60, do_sample=False)[0].tolist()
    with MultiVariantModel(loaded.model) as served, Engine(served, loaded.tokenizer) as engine:
        assert engine.end_ids == {1, 2}
        generation = engine.submit(GenerationRequest(ids, SamplingParams(temperature=0, max_tokens=60)))
        text = "".join(event.text for event in generation)
        found = generation.result(SECONDS)
    assert [*ids, *found.token_ids] == wanted
    prompt = loaded.tokenizer.decode(ids, skip_special_tokens=True)
    assert prompt + text == loaded.tokenizer.decode(wanted, skip_special_tokens=True)


def test_variants_of_a_real_model_answer_in_one_batch_as_they_do_alone(nano: Any, tmp_path: Path) -> None:
    served, tokenizer = nano

    def signs(_name: str, shape: tuple[int, ...]) -> Any:
        return ("bitdelta", {}) if len(shape) == 2 else None

    source = ToySource("a", "b")
    for number, name in enumerate(source.variants):
        path = write_random_delta(served.model, tmp_path / f"{name}.gymdelta", signs, seed=number, size=0.02)
        source.variants[name] = load(path, served.layout)
    requested = [
        GenerationRequest(
            chat(tokenizer, question),
            SamplingParams(temperature=heat, max_tokens=10, seed=3, ignore_eos=True),
            name,
        )
        for question, heat, name in zip(QUESTIONS[:3], (0.0, 0.7, 0.0), ("a", "b", None), strict=True)
    ]
    with Engine(served, tokenizer, source) as engine:
        alone = [engine.submit(request).result(SECONDS) for request in requested]
        together = [
            generation.result(SECONDS) for generation in [engine.submit(request) for request in requested]
        ]
        assert engine.stats().rows_with_variants > 0
    assert [said(one) for one in together] == [said(one) for one in alone]
    assert len({one.token_ids for one in alone}) == 3
    assert not +source.pins


def test_drawn_answers_of_a_large_vocabulary_are_the_same_alone_and_among_others(tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30_000, max_position_embeddings=128, **size))
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    requested = [
        GenerationRequest(
            [number + 3] * (2 + 5 * number),
            SamplingParams(temperature=1.0, top_p=0.9 if number == 2 else 1.0, seed=number, max_tokens=20),
        )
        for number in range(4)
    ]
    with MultiVariantModel(model) as served, Engine(served, tokenizer) as engine:
        alone = [engine.submit(request).result(SECONDS) for request in requested]
        together = [
            generation.result(SECONDS) for generation in [engine.submit(request) for request in requested]
        ]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({token_id for one in alone for token_id in one.token_ids}) > 40


def test_logprobs_are_those_of_a_plain_forward(nano: Any) -> None:
    served, tokenizer = nano
    ids = chat(tokenizer, QUESTIONS[1])
    sampling = SamplingParams(temperature=1.5, presence_penalty=1.0, max_tokens=6, seed=2, logprobs=3)
    with Engine(served, tokenizer) as engine:
        found = engine.submit(GenerationRequest(ids, sampling)).result(SECONDS)
    stock = load_model("gym-nano").model
    with torch.inference_mode():
        logits = stock(torch.tensor([[*ids, *found.token_ids]])).logits[0, len(ids) - 1 : -1]
    shares = torch.log_softmax(logits.float(), dim=-1)
    assert len(found.logprobs) == len(found.token_ids)
    for place, (token_id, logprob) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        assert logprob.token_id == token_id
        assert logprob.logprob == pytest.approx(float(shares[place, token_id]), abs=1e-4)
        assert [one[0] for one in logprob.top] == shares[place].topk(3).indices.tolist()
        assert [one[2] for one in logprob.top] == pytest.approx(
            shares[place].topk(3).values.tolist(), abs=1e-4
        )
        assert all(one[1] == TextDecoder(tokenizer).token(one[0]) for one in logprob.top)


async def test_answers_stream_to_asyncio_beside_one_another(tokenizer: Any) -> None:
    async def read(generation: Any) -> str:
        return "".join([event.text async for event in generation])

    requested = requests(6, [None])
    with Engine(ToyModel(), tokenizer) as engine:
        generations = [engine.submit(request) for request in requested]
        texts = await asyncio.gather(*(read(one) for one in generations))
        wholes = [await engine.submit(request).result_async() for request in requested]
    assert texts == [one.text for one in wholes]
    assert any(texts)


async def test_waiting_for_a_whole_answer_leaves_the_event_loop_to_others() -> None:
    generation = Generation(GenerationRequest([1], SamplingParams()))
    whole = CompletionOutput("ab", (1, 2), "stop", (), 1, 0.1, 0.2)
    generation._put(Event("a"))
    at_last = threading.Timer(10, generation._put, (Event("b", finish_reason="stop"), whole))
    at_last.start()
    waiting = asyncio.create_task(generation.result_async())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    at_last.cancel()
    generation._put(Event("b", finish_reason="stop"), whole)
    assert await waiting is whole
    assert [event.text async for event in generation] == ["a", "b"]


def test_a_reader_that_does_not_read_holds_up_no_one(tokenizer: Any) -> None:
    with Engine(ToyModel(), tokenizer) as engine:
        unread = engine.submit(GenerationRequest([1], SamplingParams(max_tokens=30, seed=1)))
        read = engine.submit(GenerationRequest([2], SamplingParams(max_tokens=30, seed=1)))
        assert len(read.result(SECONDS).token_ids) == 30
        events = list(unread)
    assert sum(len(event.token_ids) for event in events) == 30
    assert [event.finish_reason for event in events][-1] == "length"


def test_an_embedding_takes_its_turn_and_knows_variants(tokenizer: Any) -> None:
    toy, source = ToyModel(), ToySource("alice")
    with Engine(toy, tokenizer, source) as engine:
        toy.gate.clear()
        running = engine.submit(GenerationRequest([1], SamplingParams(max_tokens=5, seed=1)))
        requested = engine.embed([4, 5], "alice", "u")
        toy.gate.set()
        assert torch.allclose(requested.result(SECONDS), toy.embed([4, 5], source.variants["alice"]))
        assert running.result(SECONDS).finish_reason == "length"
        assert engine.stats().embeddings == 1
        with pytest.raises(GymError) as refused:
            engine.embed([4], "nobody")
    assert refused.value.code is ErrorCode.NOT_FOUND
    assert not +source.pins
