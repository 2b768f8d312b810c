"""Tokens proposed by a draft model change how many steps an answer takes, and not the answer."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gym_fed.base.models import nano_path
from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.draft_model import DraftModel
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.proposals import DraftProposer
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.forward.kv_cache import KVPool
from gym_fed.serving.setup import open_serving
from tests.support.toy_engine import ToyModel, ToySource
from tests.support.wait import SECONDS

DRAFT = EngineConfig(speculative="draft", speculative_tokens=5)


class ToyDraft(ToyModel):
    """The toy with other weights for the output: it is right about most tokens."""

    layout = SimpleNamespace(device="cpu")

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self._out = self._out + noise * torch.randn(
            self._out.shape, generator=torch.Generator().manual_seed(1)
        )
        self.pool = self.new_pool()


def requests(number: int = 2) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            [7, 8, 9, place] * 6,
            SamplingParams(
                max_tokens=30 + place,
                temperature=0.6 * (place % 2),
                logprobs=2 if place else None,
                seed=place,
                ignore_eos=True,
            ),
            (None, "alice", "bob")[place % 3],
            f"u{place}",
        )
        for place in range(number)
    ]


def answered(
    tokenizer: Any, config: EngineConfig, draft: Any, wanted: list[GenerationRequest]
) -> tuple[Any, ...]:
    with Engine(ToyModel(), tokenizer, ToySource("alice", "bob"), config, draft) as engine:
        found = [engine.submit(request).result(SECONDS) for request in wanted]
        stats = engine.stats()
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in found], stats


@pytest.mark.parametrize("noise", [0.0, 0.3, 30.0])
def test_answers_are_those_without_a_draft(tokenizer: Any, noise: float) -> None:
    plain, before = answered(tokenizer, EngineConfig(), None, requests())
    draft = ToyDraft(noise)
    found, stats = answered(tokenizer, DRAFT, draft, requests())
    assert found == plain
    assert stats.proposed_tokens > 0
    if not noise:
        assert stats.steps < 0.7 * before.steps
    assert draft.pool.free_blocks == draft.pool.num_blocks


SCHEMA = '{"type": "array", "items": {"enum": [true]}, "minItems": 8, "maxItems": 12}'


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "min_p": 0.1},
        {"logit_bias": {65: 4.0, 97: -9.0}, "logprobs": 0},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 2},
        {"stop": ("a", "e", "o"), "logprobs": 2},
        {"json_schema": SCHEMA, "logprobs": 1},
        {"min_tokens": 12, "ignore_eos": False, "stop_token_ids": (65, 66, 67)},
        {"max_tokens": 1},
        {"max_tokens": 2, "logprobs": 1},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_no_parameter_makes_a_draft_change_an_answer(tokenizer: Any, sampling: dict[str, Any]) -> None:
    params = {"max_tokens": 40, "temperature": 0.0, "seed": 3, "ignore_eos": True, **sampling}
    wanted = [
        GenerationRequest([7, 8, 9] * 4, SamplingParams(**params), variant) for variant in (None, "bob")
    ]
    plain, _ = answered(tokenizer, EngineConfig(), None, wanted)
    found, stats = answered(tokenizer, DRAFT, ToyDraft(0.3), wanted)
    assert found == plain
    assert (stats.proposed_tokens > 0) == (params["max_tokens"] > 2)
    assert stats.generated_tokens == sum(len(tokens) for tokens, *_ in found)


def test_a_cancelled_answer_frees_the_draft_s_cache_and_the_next_is_unchanged(tokenizer: Any) -> None:
    draft, (request, _) = ToyDraft(), requests()
    with Engine(ToyModel(), tokenizer, None, DRAFT, draft) as engine:
        generation = engine.submit(request)
        next(iter(generation))
        generation.cancel()
        assert generation.result(SECONDS).finish_reason == "cancelled"
        whole = engine.submit(request).result(SECONDS)
    assert [(whole.token_ids, whole.text, whole.finish_reason, whole.logprobs)] == answered(
        tokenizer, EngineConfig(), None, [request]
    )[0]
    assert draft.pool.free_blocks == draft.pool.num_blocks


def test_with_a_full_kv_cache_answers_are_preempted_and_unchanged(tokenizer: Any) -> None:
    wanted = requests(6)
    plain, _ = answered(tokenizer, EngineConfig(), None, wanted)
    size = {"kv_cache_size": ToyModel.bytes_per_token * 16 * 18}
    draft = ToyDraft(0.3)
    with Engine(
        ToyModel(), tokenizer, ToySource("alice", "bob"), DRAFT.model_copy(update=size), draft
    ) as engine:
        generations = [engine.submit(request) for request in wanted]
        found = [generation.result(SECONDS) for generation in generations]
        stats = engine.stats()
    assert [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in found] == plain
    assert stats.preemptions > 0
    assert draft.pool.free_blocks == draft.pool.num_blocks


def test_base_and_draft_share_the_size_of_the_kv_cache(tokenizer: Any) -> None:
    base, draft = ToyModel(), ToyDraft()
    block = 16 * base.bytes_per_token
    config = DRAFT.model_copy(update={"kv_cache_size": 21 * block})
    with Engine(base, tokenizer, None, config, draft) as engine:
        assert (base.pool.num_blocks, draft.pool.num_blocks) == (10, 10)
        assert engine.stats().kv_bytes_limit == 21 * block // 2


def test_a_draft_that_is_the_model_itself_is_always_right_about_greedy_answers(tokenizer: Any) -> None:
    _, stats = answered(tokenizer, DRAFT, ToyDraft(), requests(1))
    assert stats.accepted_tokens == stats.proposed_tokens
    assert stats.steps <= 8  # of 30 tokens, up to six a step


def test_many_answers_at_once_get_no_proposals(tokenizer: Any) -> None:
    wanted = requests(8)
    with Engine(ToyModel(), tokenizer, ToySource("alice", "bob"), DRAFT, ToyDraft()) as engine:
        generations = engine.submit_all(wanted)
        for generation in generations:
            generation.result(SECONDS)
        assert engine.stats().proposed_tokens < 30  # only while few are left at the end


def test_a_long_prompt_is_read_in_parts(tokenizer: Any) -> None:
    config = DRAFT.model_copy(update={"max_batch_tokens": 16})
    draft = ToyDraft()
    found, stats = answered(tokenizer, config, draft, requests(1))
    assert found == answered(tokenizer, EngineConfig(), None, requests(1))[0]
    assert max(sum(tokens for tokens, _ in step) for step in draft.steps) <= 16
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("limit", [{"vocabulary": 9}, {"context": 20}])
def test_texts_that_the_draft_cannot_read_get_no_proposals(
    tokenizer: Any, limit: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens that a variant has added, and texts longer than the draft's context, are not its failure."""
    draft = ToyDraft()
    draft.vocabulary = limit.get("vocabulary", draft.vocabulary)
    draft.model.config.max_position_embeddings = limit.get("context", 256)
    with caplog.at_level(logging.ERROR):
        found, stats = answered(tokenizer, DRAFT, draft, requests(1))
    assert found == answered(tokenizer, EngineConfig(), None, requests(1))[0]
    assert stats.proposed_tokens == 0
    assert not caplog.text


def test_a_base_in_4_bits_is_no_draft_of_itself() -> None:
    config = ServingConfig(base="gym-nano", base_format="int4", engine={"speculative": "draft"})
    with pytest.raises(GymError, match="no faster than the base itself"):
        open_serving(config)


def test_without_room_for_the_draft_s_cache_there_are_no_proposals(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = ToyDraft()
    monkeypatch.setattr(draft, "new_pool", lambda _: ToyModel.new_pool(draft, draft.bytes_per_token * 16))
    found, stats = answered(tokenizer, DRAFT, draft, requests(1))
    assert found == answered(tokenizer, EngineConfig(), None, requests(1))[0]
    assert stats.proposed_tokens == 0


def test_a_draft_that_fails_is_turned_off_and_answers_go_on(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("broken draft")

    draft = ToyDraft()
    draft.fail = fail
    with caplog.at_level(logging.ERROR):
        found, _ = answered(tokenizer, DRAFT, draft, requests(1))
    assert found == answered(tokenizer, EngineConfig(), None, requests(1))[0]
    assert caplog.text.count("the draft model failed") == 3
    assert "off until the next start" in caplog.text


def test_a_draft_and_its_setting_go_together(tokenizer: Any) -> None:
    for config, draft in ((DRAFT, None), (EngineConfig(), ToyDraft())):
        with pytest.raises(GymError, match=r"engine\.speculative is") as refused:
            Engine(ToyModel(), tokenizer, None, config, draft)
        assert refused.value.code is ErrorCode.USAGE
    with pytest.raises(ValueError, match="draft_model is set, but speculative is ngram"):
        EngineConfig(speculative="ngram", draft_model="gym-nano")


def test_a_server_drafts_with_its_own_base_in_4_bits(tmp_path: Path) -> None:
    request = GenerationRequest([5, 6, 7], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    answers = []
    for engine in ({}, {"speculative": "draft"}):
        with open_serving(ServingConfig(base="gym-nano", dtype="float32", engine=engine)) as serving:
            answers.append(serving.engine.submit(request).result(SECONDS).token_ids)
            note, accepted = serving.description.note, serving.engine.stats().accepted_tokens
    assert answers[0] == answers[1]
    assert accepted > 0
    assert note == "gym-nano in int4 proposes tokens (speculative decoding)"


def test_a_draft_with_other_tokens_is_refused(tmp_path: Path) -> None:
    other = shutil.copytree(nano_path(), tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    config = ServingConfig(base="gym-nano", engine={"speculative": "draft", "draft_model": str(other)})
    with pytest.raises(GymError, match=r"engine\.draft_model: .* different ids for 2 of") as refused:
        open_serving(config)
    assert refused.value.code is ErrorCode.CONFIG_INVALID


def test_errors_of_a_draft_name_its_setting(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    unpacked = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=262, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=258)
    GPT2LMHeadModel(config).save_pretrained(unpacked)
    for file in nano_path().glob("tokenizer*"):
        shutil.copy(file, unpacked)
    refused = []
    for draft in (tmp_path / "absent", unpacked):
        engine = {"speculative": "draft", "draft_model": str(draft)}
        with pytest.raises(GymError, match=r"^engine\.draft_model: ") as error:
            open_serving(ServingConfig(base="gym-nano", engine=engine))
        refused.append(error.value)
    assert refused[0].code is ErrorCode.MODEL_NOT_FOUND
    assert "absent: no such folder" in refused[0].message
    assert "served by transformers' own forward pass" in refused[1].message
    assert "engine.speculative: ngram" in refused[1].hint
    with pytest.raises(ValueError, match="at least 1 character"):
        EngineConfig(speculative="draft", draft_model="")


def test_a_draft_whose_state_cannot_be_rolled_back_is_refused(tokenizer: Any) -> None:
    draft = ToyDraft()
    draft.pool = SimpleNamespace(paged=False, block_bytes=16)
    with pytest.raises(GymError, match="the state of the draft model cannot be rolled back"):
        Engine(ToyModel(), tokenizer, None, DRAFT, draft)
    assert KVPool().paged


class Drafting:
    """A draft, and answers in decode that it proposes tokens for."""

    def __init__(self, *texts: list[int], blocks: int = 100, **limits: int) -> None:
        self.toy = ToyDraft()
        kv_bytes = 16 * blocks * self.toy.bytes_per_token
        self.draft = DraftModel(
            self.toy, kv_bytes, **{"vocabulary": 262, "max_tokens": 1000, "context": 256, **limits}
        )
        self.rows: list[Any] = [
            SimpleNamespace(proposer=DraftProposer(ids, 4), pictures=(), most_proposed=9) for ids in texts
        ]

    def proposals(self) -> list[list[int]]:
        self.draft.prepare(self.rows)
        return [row.proposer.ready for row in self.rows]

    @property
    def used_blocks(self) -> int:
        return self.toy.pool.num_blocks - self.toy.pool.free_blocks


@pytest.mark.parametrize(
    ("ids", "limits", "count"),
    [
        ([7, 8], {"vocabulary": 9}, 4),
        ([7, 9], {"vocabulary": 9}, 0),
        ([7] * 16, {"context": 20}, 4),
        ([7] * 17, {"context": 20}, 0),
        ([7] * 13, {"blocks": 1}, 4),  # the last proposed token is not read
        ([7] * 14, {"blocks": 1}, 0),
    ],
)
def test_a_text_is_drafted_up_to_the_limits(ids: list[int], limits: dict[str, int], count: int) -> None:
    drafting = Drafting(ids, **limits)
    (proposal,) = drafting.proposals()
    assert len(proposal) == count
    assert all(token < limits.get("vocabulary", 262) for token in proposal)


def test_texts_with_images_and_more_than_one_text_are_not_drafted() -> None:
    drafting = Drafting([7, 8])
    drafting.rows[0].pictures = ("picture",)
    assert drafting.proposals() == [[]]
    assert Drafting([7, 8], [9]).proposals() == [[], []]


def test_a_prompt_that_is_read_in_parts_gets_the_same_proposals() -> None:
    ids = list(range(40))
    parts, whole = Drafting(list(ids), max_tokens=16), Drafting(list(ids))
    assert [parts.proposals() for _ in range(3)] == [[[]], [[]], whole.proposals()]


@pytest.mark.parametrize("accepted", range(6))
def test_what_was_drafted_is_read_again_from_the_first_other_token_on(accepted: int) -> None:
    drafting = Drafting(ids := [7, 8, 9])
    (proposal,) = drafting.proposals()
    ids += [*proposal[:accepted], 11] if accepted < 5 else [11, *proposal]
    assert drafting.proposals() == Drafting(list(ids)).proposals()
    assert drafting.toy.steps[4][0][0] == (len(ids) - 3 - min(accepted, 3) if accepted < 5 else 5)


def test_only_failures_in_a_row_turn_a_draft_off_and_each_frees_its_cache() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("broken draft")

    drafting = Drafting([7, 8])
    for fails in (True, True, False, True, True, False):
        drafting.toy.fail = fail if fails else None
        assert (drafting.proposals() == [[]]) == fails
        assert drafting.used_blocks == (not fails)
    drafting.draft.release()
    assert drafting.used_blocks == 0
