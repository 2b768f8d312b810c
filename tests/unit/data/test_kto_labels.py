"""KTO's labels as people write them, in files and in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import load_rows

LIKED: list[Any] = [True, 1, 1.0, "true", "True", "1", " TRUE ", "1.0"]
DISLIKED: list[Any] = [False, 0, 0.0, "false", "False", "0", "0.0"]


def rows(labels: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i}", "completion": f"a{i}", "label": label} for i, label in enumerate(labels)]


def encoded(labels: list[Any]) -> list[bool]:
    config = TrainingConfig(algorithm="kto", kto={"loss_type": "apo_zero_unpaired"})
    found = ALGORITHMS.new("kto").encode(config, load_tokenizer("gym-nano"), rows(labels))
    return [row["label"] for row in found]


@pytest.mark.parametrize("format", ["kto", "auto"])
@pytest.mark.parametrize(("label", "liked"), [*((x, True) for x in LIKED), *((x, False) for x in DISLIKED)])
def test_a_label_is_read_as_people_write_it(tmp_path: Path, label: Any, liked: bool, format: Any) -> None:
    file = tmp_path / "kto.jsonl"
    file.write_text(json.dumps(rows([label])[0]) + "\n")
    found = list(load_rows(str(file), format=format))
    assert found[0]["label"] is liked


@pytest.mark.parametrize("label", [2, -1, 0.5, "yes!", "", None, [1]])
def test_another_label_is_refused_where_it_stands(tmp_path: Path, label: Any) -> None:
    file = tmp_path / "kto.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows([True, label])))
    with pytest.raises(GymError, match=r"kto.jsonl.*2.*'label' is .*expected true or false") as caught:
        list(load_rows(str(file), format="kto"))
    assert caught.value.code is ErrorCode.DATA_INVALID
    with pytest.raises(GymError, match="row 2: label is"):
        encoded([True, label])


def test_rows_in_memory_may_hold_numbers() -> None:
    assert sorted(encoded([1, 0, "true", 0.0])) == [False, False, True, True]


@pytest.mark.parametrize(("labels", "said"), [([1, True], "true"), ([0, 0.0], "false")])
def test_labels_that_are_all_equal_are_warned_of(
    labels: list[Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded(labels)
    assert f"warning: kto: the label of all 2 rows is {said}" in " ".join(capsys.readouterr().err.split())
    encoded([True, False])
    assert "kto:" not in capsys.readouterr().err


def test_a_key_that_pairs_do_not_read_is_refused_by_the_name_that_was_given() -> None:
    config = TrainingConfig(algorithm="dpo", train_on_prompt=True)
    with pytest.raises(GymError, match=r"^train_on_prompt: not used by dpo, which learns from answers"):
        ALGORITHMS.new("dpo").check(config)
