"""What joining costs, before it is joined: a round's time by real steps, and the bytes that come down."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_client.agent.global_model import GlobalModel
from gym_client.cli import costs
from gym_client.cli.costs import RoundTime, time_round
from gym_client.cli.terms_in_words import offer_lines
from gym_client.hub.traffic import Bandwidth

from gym_fed.config.hub.task import LoraRecipe, TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from tests.unit.client.test_client_offer import an_offer

ROWS = [
    {"messages": [{"role": "user", "content": c}, {"role": "assistant", "content": c * 3}]}
    for c in "abcdefgh"
]


def recipe(**changes: Any) -> TrainingRecipe:
    return TrainingRecipe(**{"max_steps": 40, "per_device_train_batch_size": 2, "max_length": 32, **changes})


@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_a_round_is_timed_by_real_steps_that_leave_the_model_as_it_was(
    tiny_base: Path, finetuning: str
) -> None:
    model = GlobalModel(str(tiny_base))
    wanted = recipe(finetuning=finetuning, lora=LoraRecipe(r=2))
    found = time_round(model, wanted, ROWS, "cpu", threading.Event())
    assert found.measured == "2 steps of 2 rows"
    assert found.seconds is not None
    assert 0 < found.seconds < 600
    names = {name for name, _ in model.model.named_parameters()}
    assert names == set(model.tensors)
    for name, value in model.model.named_parameters():
        assert torch.equal(value, model.tensors[name])
        assert value.requires_grad


def test_steps_that_would_take_long_are_timed_on_fewer_rows_and_by_a_pass_alone(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = GlobalModel(str(tiny_base)), recipe(per_device_train_batch_size=8)
    tried: list[int] = []

    def step(*arguments: Any) -> tuple[float, int]:
        tried.append(arguments[-1])
        return 0.5, 3

    monkeypatch.setattr(costs, "_step_seconds", step)
    monkeypatch.setattr(costs, "_row_tokens", lambda *_: 32)
    monkeypatch.setattr(costs, "_pace", lambda *_: (6.0 / (3 * 3 * 32 * 3), 32))
    found = time_round(model, wanted, ROWS, "cpu", threading.Event())
    assert tried == [3]
    assert found.seconds == pytest.approx(0.5 * 8 / 3 * 40)
    monkeypatch.setattr(costs, "_pace", lambda *_: (1.0, 16))
    found = time_round(model, wanted, ROWS, "cpu", threading.Event())
    assert tried == [3]
    assert found == RoundTime(3 * 32 * 8 * 40, "one pass of 16 tokens, scaled to rows of 32 tokens")


@pytest.mark.parametrize(
    ("algorithm", "max_length", "expected"), [("sft", 512, None), ("sft", 8, 8), ("pretrain", 512, 512)]
)
def test_a_slow_round_is_estimated_from_the_tokens_of_the_rows_that_exist(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, max_length: int, expected: int | None
) -> None:
    model = GlobalModel(str(tiny_base))
    rows = ROWS if algorithm == "sft" else [{"text": "abc"}] * 8
    if expected is None:
        lengths = [
            len(model.tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"])
            for row in ROWS
        ]
        expected = max(lengths)
        assert expected < max_length // 4
    monkeypatch.setattr(costs, "_pace", lambda *_: (1.0, 16))
    wanted = recipe(algorithm=algorithm, max_length=max_length)
    found = time_round(model, wanted, rows, "cpu", threading.Event())
    assert found == RoundTime(
        3 * expected * 2 * 40, f"one pass of 16 tokens, scaled to rows of {expected} tokens"
    )


def test_a_stop_ends_the_measurement(tiny_base: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(GymError) as caught:
        time_round(GlobalModel(str(tiny_base)), recipe(), ROWS, "cpu", stop)
    assert caught.value.code is ErrorCode.INTERRUPTED


def test_a_recipe_that_cannot_be_tried_is_said_to_be_not_measured(tiny_base: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a" * 900}, {"role": "assistant", "content": "b"}]}]
    found = time_round(GlobalModel(str(tiny_base)), recipe(), rows, "cpu", threading.Event())
    assert found.seconds is None
    assert found.measured.startswith("the training steps could not be run: ")


def test_the_terms_show_time_base_and_total_and_a_yes_by_name_does_not_depend_on_them() -> None:
    plain = an_offer(rounds=10, join_download_bytes=5_000_000, round_download_bytes=1_000_000)
    offer = plain.with_costs(RoundTime(90.0, "2 steps"), 1_000_000_000, Bandwidth(5e6, "just measured"))
    lines = "\n".join(text for _, text in offer_lines(offer))
    assert "about 2 min a round on cpu; 10 rounds (15 min) or until you stop" in lines
    assert "timed: 2 steps" in lines
    assert "5.0 MB to join, the base's 1.00 GB, at 5.0 MB/s (just measured)" in lines
    assert "1.01 GB (about 3 min) in 10 rounds, 10.0 kB up" in lines
    costs = offer.to_dict()["costs"]
    assert costs["round_seconds"] == 90.0
    assert costs["total_seconds"] == 900.0
    assert costs["base_bytes"] == 1_000_000_000
    assert costs["total_download_bytes"] == 1_015_000_000
    assert offer.fixed_terms() == plain.fixed_terms()
    here = replace(plain, rounds=None).with_costs(RoundTime(None, "why"), 0, None)
    lines = "\n".join(text for _, text in offer_lines(here))
    assert "not timed: why" in lines
    assert "no base (it is already here)" in lines
    assert here.to_dict()["costs"]["total_seconds"] is None
