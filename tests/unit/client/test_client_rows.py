"""A contributor's rows: the terms name what is learned of them, and data that teaches nothing never joins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.agent.global_model import global_model
from gym_client.cli.join import join
from gym_client.cli.join_options import JoinOptions
from gym_client.cli.offer import Offer
from gym_client.cli.terms_in_words import offer_lines
from gym_client.identity.home import Home

from gym_fed.base.models import load_tokenizer
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows
from gym_fed.data.encoding import prompt_ids
from tests.support.agent_scene import Recorder
from tests.support.tiny_hub import TinyHub
from tests.unit.client.test_client_waiting import Yes

LONG = "a question of many words, " * 8


def turns(question: str, answer: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


class Shown(Yes):
    """Declines, after it has kept the offer."""

    offered: Offer | None = None

    def offer(self, offer: Any) -> bool:
        self.offered = offer
        return False


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[TinyHub]:
    hub = TinyHub(tmp_path / "hub").start()
    hub.announces = {"base_model": "tiny", "base_digest": global_model(str(tiny_base)).base.digest}
    yield hub
    hub.stop()


def ask(
    hub: TinyHub, tmp_path: Path, base: Path, rows: Any, columns: str | None = None, **recipe: Any
) -> tuple[GymError, Offer | None]:
    """Why a join ended, and what was offered before."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"recipe": TrainingRecipe(**recipe), "codec": CodecPolicy()}
    hub.announces["recipe_json"] = json.dumps(
        {key: one.model_dump(mode="json") for key, one in values.items()}
    )
    consent = Shown()
    options = JoinOptions(
        server=hub.address, fingerprint=hub.fingerprint, data=file, columns=columns, model=str(base)
    )
    with pytest.raises(GymError) as caught:
        join(Home.open(tmp_path / "home"), options, consent, Recorder())
    assert not hub.enrolled
    return caught.value, consent.offered


def test_the_terms_say_what_is_learned_cut_and_dropped(hub: TinyHub, tmp_path: Path, tiny_base: Path) -> None:
    rows: list[Any] = [{"messages": turns("hi", "yes"), "id": i} for i in range(3)]
    rows += [
        {"messages": turns("hi", "x" * 99)},
        {"messages": turns(LONG, "no")},
        {"messages": turns(LONG, "so")},
    ]
    error, offer = ask(hub, tmp_path, tiny_base, rows, max_length=64)
    assert error.code is ErrorCode.PERMISSION_DENIED
    assert offer is not None
    assert offer.num_examples == 4
    rows = json.loads(json.dumps(offer.to_dict()))["rows"]
    assert {key: rows[key] for key in ("rows", "learned", "cut", "dropped")} == {
        "rows": 6, "learned": 4, "cut": 3, "dropped": 2
    }  # fmt: skip
    text = dict(offer_lines(offer))["data"]
    assert (
        "; warning: 6 rows, 2 dropped, 3 cut; 4 of 6 rows are trained on, 2 dropped (no tokens to train on)"
        in text
    )
    assert "3 are longer than max_length 64" in text
    assert "% of the rows" in text
    assert text.endswith("not read: id (3 rows)")


def test_the_terms_say_once_that_every_row_is_learned(hub: TinyHub, tmp_path: Path, tiny_base: Path) -> None:
    _, offer = ask(hub, tmp_path, tiny_base, [{"messages": turns("hi", "yes")}] * 3, max_length=64)
    assert offer is not None
    text = dict(offer_lines(offer))["data"]
    assert text.count("all used") == 1
    assert re.search(r"; 3 rows, all used; [1-9]\d* labelled tokens, each \d+ times a round$", text)


def test_the_model_is_released_before_the_terms_wait_for_an_answer(
    hub: TinyHub, tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, released = global_model(str(tiny_base)), []

    def decline(consent: Shown, offer: Offer) -> bool:
        released.append(held._model is None)
        return False

    monkeypatch.setattr(Shown, "offer", decline)
    ask(hub, tmp_path, tiny_base, [{"messages": turns("hi", "yes")}] * 3)
    assert released == [True]
    assert held.model.config.model_type  # loaded again for the first task


def test_a_recipe_whose_moments_are_over_the_policys_limit_is_refused_before_the_terms_are_shown(
    hub: TinyHub, tmp_path: Path, tiny_base: Path
) -> None:
    rows = [{"messages": turns("hi", "yes")}] * 3
    _, offer = ask(hub, tmp_path, tiny_base, rows, keep_optimizer_state=True)
    assert offer is not None
    assert offer.kept_bytes == global_model(str(tiny_base)).moments_bytes() > 1000
    Home.open(tmp_path / "home").policy_path.write_text("max_optimizer_state_bytes: 1000\n")
    error, offer = ask(hub, tmp_path, tiny_base, rows, keep_optimizer_state=True)
    assert error.code is ErrorCode.POLICY_REFUSED
    assert "max_optimizer_state_bytes" in error.message + error.hint
    assert offer is None


@pytest.mark.parametrize(
    ("algorithm", "row", "said"),
    [
        (
            "sft",
            {"messages": turns(LONG, "no")},
            "none of the 2 rows has tokens to train on within max_length=64",
        ),
        ("sft", {"messages": turns("hi", "no", weight=0)}, "none of the 2 rows has tokens to train on"),
        ("sft", {"prompt": "what?"}, "rows.jsonl:1 is a prompt row, but supervised rows are needed for sft"),
        (
            "dpo",
            {"prompt": LONG, "chosen": "a", "rejected": "b"},
            "none of the 2 rows has tokens to train on",
        ),
        (
            "dpo",
            {"messages": turns("hi", "no")},
            "rows.jsonl:1 is a supervised row, but preference rows are needed",
        ),
        (
            "kto",
            {"prompt": LONG, "completion": "a", "label": True},
            "none of the 2 rows has tokens to train on",
        ),
        ("kto", {"text": "a"}, "rows.jsonl:1 is a supervised row, but unpaired rows are needed"),
    ],
)
def test_data_that_the_recipe_cannot_learn_from_is_refused_before_enrolling(
    hub: TinyHub, tmp_path: Path, tiny_base: Path, algorithm: str, row: Any, said: str
) -> None:
    error, offer = ask(hub, tmp_path, tiny_base, [row, row], algorithm=algorithm, max_length=64)
    assert error.code is ErrorCode.DATA_INVALID
    assert said in error.message
    assert offer is None


def test_a_private_recipe_refuses_data_with_nothing_to_learn_too(
    hub: TinyHub, tmp_path: Path, tiny_base: Path
) -> None:
    privacy = {"noise_multiplier": 1.0, "target_delta": 1e-5, "max_grad_norm": 1.0}
    rows = [{"messages": turns(LONG, "no")}] * 2
    more = {"max_length": 64, "per_device_train_batch_size": 2, "privacy": privacy}
    error, _ = ask(hub, tmp_path, tiny_base, rows, **more)
    assert "none of the 2 rows has tokens to train on" in error.message


@pytest.mark.shared
def test_gsm8k_joins_with_the_rows_that_are_learned(
    hub: TinyHub, tmp_path: Path, tiny_base: Path, shared_folder: Path
) -> None:
    columns = "prompt=question,completion=answer"
    rows = load_rows(
        shared_folder / "data/gsm8k/train.jsonl", columns={"prompt": "question", "completion": "answer"}
    )
    chosen = [{"question": row["prompt"], "answer": row["completion"]} for row in rows[:400]]
    tokenizer = load_tokenizer(str(tiny_base))
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": row["question"]}]) for row in chosen]
    shorter = sum(len(prompt) < 128 for prompt in prompts)
    _, offer = ask(hub, tmp_path, tiny_base, chosen, columns, max_length=128)
    assert offer is not None
    assert (offer.rows["rows"], offer.num_examples) == (400, shorter)
    assert 0 < shorter < 100
