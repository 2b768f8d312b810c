"""The form changes one value of a YAML text, and nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gym_fed.config.recipes import recipes
from gym_fed.config.yaml.edit import with_value
from gym_fed.core.errors import ErrorCode, GymError

TEXT = """\
# What it is.
algorithm: sft  # how
model: gym-nano
data:
  - {tasks: [double], num_examples: 20}
early_stopping: {patience: 3}  # soon
lora:
  # the rank
  r: 8
  lora_alpha: 16

max_steps: 30
"""


@pytest.mark.parametrize(
    ("key", "value", "before", "after"),
    [
        ("algorithm", "dpo", "algorithm: sft  # how", "algorithm: dpo  # how"),
        ("max_steps", 7, "max_steps: 30", "max_steps: 7"),
        ("model", "a: b #c", "model: gym-nano", "model: 'a: b #c'"),
        ("model", "yes", "model: gym-nano", "model: 'yes'"),
        ("early_stopping.patience", 9, "{patience: 3}  # soon", "{patience: 9}  # soon"),
        ("early_stopping.metric", "loss", "{patience: 3}  # soon", "{patience: 3, metric: loss}  # soon"),
        ("lora.r", 4, "  r: 8", "  r: 4"),
        ("lora.bias", "all", "  lora_alpha: 16\n", "  lora_alpha: 16\n  bias: all\n"),
        ("seed", 3, "max_steps: 30\n", "max_steps: 30\nseed: 3\n"),
        ("dpo.beta", 0.5, "max_steps: 30\n", "max_steps: 30\ndpo:\n  beta: 0.5\n"),
        ("max_steps", None, "max_steps: 30\n", ""),
        ("lora.r", None, "  r: 8\n", ""),
        ("seed", None, "", ""),
        ("data", None, "data:\n  - {tasks: [double], num_examples: 20}\n", ""),
        ("liger", True, "max_steps: 30\n", "max_steps: 30\nliger: true\n"),
        (
            "data",
            [{"path": "a.csv", "columns": {"prompt": "Q, or so", "completion": "A: b"}}, {"path": "yes"}],
            "  - {tasks: [double], num_examples: 20}\n",
            "  - path: a.csv\n    columns: {prompt: 'Q, or so', completion: 'A: b'}\n  - path: 'yes'\n",
        ),
        ("graders", [{"grader": "exact"}], "max_steps: 30\n", "max_steps: 30\ngraders:\n  - grader: exact\n"),
        ("data", [], "data:\n  - {tasks: [double], num_examples: 20}\n", "data: []\n"),
    ],
)
def test_one_line_changes_and_comments_stay(key: str, value: Any, before: str, after: str) -> None:
    assert with_value(TEXT, tuple(key.split(".")), value) == TEXT.replace(before, after, 1)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("model: |\n  a\n  b\n", "model", "c"),
        ("data: [1]\n", "data", 3),
        ("a: &x 3\nb: *x\n", "a", 4),
        ("a: &x 3\nb: *x\n", "b", 4),
        ("lora: [1]\n", "lora.r", 8),
        ("lora: 3\n", "lora.r", 8),
        ("{a: 1, b: 2}\n", "a", None),
        ("{a: 1}\n", "c", 2),
        ("early_stopping: {patience: 3}\n", "early_stopping.patience", None),
    ],
)
def test_what_cannot_be_changed_alone_is_refused(text: str, key: str, value: Any) -> None:
    with pytest.raises(GymError) as caught:
        with_value(text, tuple(key.split(".")), value)
    assert (caught.value.code, caught.value.hint) == (ErrorCode.USAGE, "edit the YAML text")


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "a: 1\na: 2\n", "\x00"])
def test_text_that_cannot_be_read_is_not_edited(text: str) -> None:
    with pytest.raises(GymError) as caught:
        with_value(text, ("a",), 1)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_an_empty_text_and_one_without_a_last_line_end_take_keys() -> None:
    assert with_value("", ("lora", "r"), 8) == "lora:\n  r: 8\n"
    assert with_value("lora:\n  r: 8", ("lora", "bias"), "all") == "lora:\n  r: 8\n  bias: all\n"
    assert (
        with_value("lora:  # none yet\nseed: 1", ("lora", "r"), 3) == "lora:  # none yet\n  r: 3\nseed: 1\n"
    )


@pytest.mark.few(12, "one editor for every recipe")
@pytest.mark.parametrize("file", [recipe.file for recipe in recipes()], ids=lambda file: file.stem)
def test_every_recipe_can_be_edited(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for path, value in (
        (("learning_rate",), 1e-5),
        (("seed",), 11),
        (("output_dir",), "runs/x"),
        (("lora", "r"), 2),
    ):
        edited = with_value(text, path, value)
        wanted = yaml.safe_load(text)
        (wanted.setdefault(path[0], {}) if len(path) == 2 else wanted)[path[-1]] = value
        assert yaml.safe_load(edited) == wanted
        assert [line for line in text.splitlines() if line.startswith("#")] == [
            line for line in edited.splitlines() if line.startswith("#")
        ]


@given(st.one_of(st.text(max_size=300), st.integers(), st.floats(allow_nan=False), st.booleans()))
def test_any_value_is_read_back_as_it_was_given_or_refused(value: Any) -> None:
    try:
        edited = with_value(TEXT, ("model",), value)
    except GymError:
        return
    assert yaml.safe_load(edited) == {**yaml.safe_load(TEXT), "model": value}


def test_a_list_of_strings_is_replaced_as_a_whole() -> None:
    hours = ["22:00-07:00", "12:00-13:00"]
    assert yaml.safe_load(with_value("pause: false  # now\n", ("hours",), hours))["hours"] == hours
    edited = with_value("hours:\n  - '01:00-02:00'\npause: false  # now\n", ("hours",), hours)
    assert yaml.safe_load(edited) == {"hours": hours, "pause": False}
    assert edited.endswith("pause: false  # now\n")
    assert with_value(edited, ("hours",), None) == "pause: false  # now\n"
