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
from gym_fed.serving.engine.engine import Engine
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


def test_a_draft_whose_state_cannot_be_rolled_back_is_refused(tokenizer: Any) -> None:
    draft = ToyDraft()
    draft.pool = SimpleNamespace(paged=False, block_bytes=16)
    with pytest.raises(GymError, match="the state of the draft model cannot be rolled back"):
        Engine(ToyModel(), tokenizer, None, DRAFT, draft)
    assert KVPool().paged
