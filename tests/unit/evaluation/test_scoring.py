"""Log-likelihoods and answers of one model and of many variants, beside the stock forward of the same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.evaluation.scoring.local import LocalScorer
from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult, Continuation, Loglikelihood
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.variant_weights import LoadedVariant, loaded_variant

NAMES = ("v0", "v1")


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    """In float32."""
    loaded = load_model("gym-nano")
    loaded.model.float().eval()
    return loaded


@pytest.fixture(scope="module")
def deltas(nano: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two one-bit deltas of every matrix."""
    base, found = BaseSpec.of(nano.model, "gym-nano"), {}
    for seed, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(seed)
        entries = [
            DeltaEntry.of(tensor, 0.01 * torch.randn(shape, generator=generator), "bitdelta")
            for tensor, shape in sorted(base.shapes.items())
            if len(shape) == 2
        ]
        found[name] = tmp_path_factory.mktemp("deltas") / f"{name}.gymdelta"
        write_delta(found[name], entries, base)
    return found


@pytest.fixture
def served(nano: LoadedModel) -> Iterator[MultiVariantModel]:
    with MultiVariantModel(nano.model) as found:
        yield found


@pytest.fixture
def variants(
    served: MultiVariantModel, nano: LoadedModel, deltas: Mapping[str, Path]
) -> dict[str, LoadedVariant | None]:
    base, found = BaseSpec.of(nano.model, "gym-nano"), {}
    for name, path in deltas.items():
        with DeltaFile.open(path, base) as delta:
            found[name] = loaded_variant(name, delta, served.layout, name)
    return {"base": None, **found}


def _stock(model: Any, context: tuple[int, ...], ids: tuple[int, ...], window: int) -> tuple[float, bool]:
    """As HFLM: the last ``window + 1`` tokens, without the last as inputs."""
    kept = torch.tensor([(context + ids)[-(window + 1) :][:-1]])
    with torch.no_grad():
        logprobs = model(kept).logits[0, -len(ids) :].double().log_softmax(-1)
    target = torch.tensor(ids)
    return float(logprobs[range(len(ids)), target].sum()), bool((logprobs.argmax(-1) == target).all())


def _asked() -> list[Continuation]:
    """Choices of questions that begin alike, one that is the beginning of another, and equal ones."""
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randint, 0, 256, generator=generator)
    beginning = tuple(draw((20,)).tolist())
    found = []
    for length in (3, 30, 61, 90):
        context = beginning + tuple(draw((length,)).tolist())
        choices = [tuple(draw((count,)).tolist()) for count in (1, 1, 2, 7)]
        found += [Continuation(context, choice) for choice in (*choices, choices[3][:4], choices[3])]
    return found


def _scored(scorer: LocalScorer, asked: list[Continuation]) -> list[Mapping[str, Loglikelihood]]:
    found = dict(scorer.loglikelihoods(asked))
    return [found[place] for place in range(len(asked))]


@pytest.fixture(scope="module")
def stock(nano: LoadedModel) -> list[tuple[float, bool]]:
    """The results of the stock forward for ``_asked``."""
    return [_stock(nano.model, one.context_ids, one.continuation_ids, 256) for one in _asked()]


@pytest.mark.parametrize("step_tokens", [16, 1024])
def test_loglikelihoods_are_those_of_the_stock_forward_whatever_shares_a_step(
    step_tokens: int, nano: LoadedModel, stock: list[tuple[float, bool]]
) -> None:
    asked, wanted = _asked(), stock
    with MultiVariantModel(nano.model) as served:
        scorer = LocalScorer(served, nano.tokenizer, {"base": None}, step_tokens=step_tokens)
        found = [one["base"] for one in _scored(scorer, asked)]
    for mine, (logprob, is_greedy) in zip(found, wanted, strict=True):
        assert mine.logprob == pytest.approx(logprob, abs=1e-4)
        assert (mine.is_greedy, mine.cut) == (is_greedy, 0)


def test_variants_are_scored_as_models_that_hold_their_deltas(
    nano: LoadedModel,
    deltas: Mapping[str, Path],
    served: MultiVariantModel,
    variants: dict[str, LoadedVariant | None],
) -> None:
    asked = _asked()
    found = _scored(LocalScorer(served, nano.tokenizer, variants), asked)
    served.close()
    for name in NAMES:
        merged = copy.deepcopy(nano.model)
        with DeltaFile.open(deltas[name]) as delta:
            apply_delta(merged, delta)
        for mine, one in zip(found, asked, strict=True):
            logprob, _ = _stock(merged, one.context_ids, one.continuation_ids, 256)
            assert mine[name].logprob == pytest.approx(logprob, abs=5e-4)
            assert mine[name].logprob != mine["base"].logprob


def test_a_variant_is_scored_alone_as_beside_others_to_the_last_bit(
    nano: LoadedModel, served: MultiVariantModel, variants: dict[str, LoadedVariant | None]
) -> None:
    asked = _asked()
    together = _scored(LocalScorer(served, nano.tokenizer, variants), asked)
    for name, variant in variants.items():
        alone = _scored(LocalScorer(served, nano.tokenizer, {name: variant}), asked)
        assert [one[name] for one in alone] == [one[name] for one in together]


def test_a_long_context_is_cut_on_the_left_and_counted(nano: LoadedModel) -> None:
    context, ids = tuple(range(1, 60)), (7, 8, 9)
    wanted = _stock(nano.model, context, ids, 32)
    with MultiVariantModel(nano.model) as served:
        scorer = LocalScorer(served, nano.tokenizer, {"base": None}, max_length=32)
        whole = Continuation(context[-30:], ids)  # 33 tokens, of which the last is no input
        found = [one["base"] for one in _scored(scorer, [Continuation(context, ids), whole])]
    assert found[0].logprob == pytest.approx(wanted[0], abs=1e-4)
    assert [one.cut for one in found] == [29, 0]
    assert found[0].logprob == found[1].logprob


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (Continuation((), (1,)), ErrorCode.USAGE),
        (Continuation((1,), ()), ErrorCode.USAGE),
        (Continuation((1,), tuple(range(33))), ErrorCode.TOO_LARGE),
    ],
    ids=["no context", "no continuation", "a continuation beyond the model's context"],
)
def test_what_cannot_be_scored_is_refused_by_its_number(
    asked: Continuation, code: ErrorCode, nano: LoadedModel, served: MultiVariantModel
) -> None:
    scorer = LocalScorer(served, nano.tokenizer, {"base": None}, max_length=32)
    with pytest.raises(GymError, match="request 1: ") as raised:
        list(scorer.loglikelihoods([Continuation((1,), (2,)), asked]))
    assert raised.value.code is code


def _prompts(nano: LoadedModel) -> list[AnswerRequest]:
    texts = [
        "Hello",
        "Question: What is 2 + 3?\nAnswer:",
        "The capital of",
        "x",
        "abcabcabcabc",
    ]
    return [
        AnswerRequest(tuple(nano.tokenizer.encode(text)), (), tokens)
        for text, tokens in zip(texts, (5, 9, 9, 1, 20), strict=True)
    ]


def _answered(scorer: LocalScorer, prompts: list[AnswerRequest]) -> list[Mapping[str, AnswerResult]]:
    found = dict(scorer.answers(prompts))
    return [found[place] for place in range(len(prompts))]


def test_answers_are_those_of_the_stock_greedy_loop(nano: LoadedModel) -> None:
    prompts = _prompts(nano)
    wanted = []
    for prompt in prompts:
        ids = list(prompt.prompt_ids)
        with torch.no_grad():
            while len(ids) < len(prompt.prompt_ids) + prompt.max_tokens:
                ids.append(int(nano.model(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] == nano.tokenizer.eos_token_id:
                    break
        wanted.append(tuple(ids[len(prompt.prompt_ids) :]))
    with MultiVariantModel(nano.model) as served:
        found = _answered(LocalScorer(served, nano.tokenizer, {"base": None}), prompts)
    assert [one["base"].token_ids for one in found] == wanted
    assert all(len(one["base"].margins) == len(one["base"].token_ids) for one in found)


def test_answers_of_variants_are_the_same_alone_in_a_batch_and_through_the_engine(
    nano: LoadedModel, served: MultiVariantModel, variants: dict[str, LoadedVariant | None]
) -> None:
    prompts = _prompts(nano)
    together = _answered(LocalScorer(served, nano.tokenizer, variants), prompts)
    assert len({tuple(one[name].token_ids for one in together) for name in variants}) == 3
    for name, variant in variants.items():
        alone = _answered(LocalScorer(served, nano.tokenizer, {name: variant}), prompts)
        _require_same([one[name] for one in alone], [one[name] for one in together])
    served.attends_plainly = False
    engine = _answered(LocalScorer(served, nano.tokenizer, variants), prompts)
    for name in variants:
        _require_same([one[name] for one in engine], [one[name] for one in together])


def _require_same(some: list[AnswerResult], others: list[AnswerResult]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (
            other.text,
            other.token_ids,
            other.finish_reason,
        )
        assert one.margins == pytest.approx(other.margins, abs=1e-3)


def test_an_answer_ends_before_a_stop_of_several_tokens_and_keeps_those_that_were_chosen(
    nano: LoadedModel, served: MultiVariantModel
) -> None:
    scorer = LocalScorer(served, nano.tokenizer, {"base": None})
    asked = [{"role": "user", "content": "copy: fzguishqa"}]
    rendered = nano.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
    prompt = AnswerRequest(tuple(rendered["input_ids"]), (), 20)
    (free,) = _answered(scorer, [prompt])
    text = free["base"].text
    assert len(text) > 8
    stop = text[3:6]
    at = text.index(stop)
    assert at == 3
    (found,) = _answered(scorer, [AnswerRequest(prompt.prompt_ids, ("", "never", stop), 20)])
    assert (found["base"].text, found["base"].finish_reason) == (text[:at], "stop")
    assert found["base"].token_ids == free["base"].token_ids[: len(found["base"].token_ids)]
    assert len(found["base"].token_ids) < len(free["base"].token_ids)


def test_a_long_prompt_is_cut_on_the_left_for_the_room_of_its_answer(
    nano: LoadedModel, served: MultiVariantModel
) -> None:
    scorer = LocalScorer(served, nano.tokenizer, {"base": None}, max_length=32)
    ids = tuple(range(1, 60))
    (long,), (short,) = (_answered(scorer, [AnswerRequest(one, (), 4)]) for one in (ids, ids[-28:]))
    assert (long["base"].cut, short["base"].cut) == (31, 0)
    assert long["base"].token_ids == short["base"].token_ids
    with pytest.raises(GymError) as raised:
        list(scorer.answers([AnswerRequest(ids, (), 32)]))
    assert raised.value.code is ErrorCode.TOO_LARGE
