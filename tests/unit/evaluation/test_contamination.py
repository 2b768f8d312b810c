"""Evaluation rows in training data are found, others are not, and the filter stays within its size and its rate."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.contamination_check import (
    MAX_BYTES,
    BloomFilter,
    ContaminationCheck,
    SuiteFilter,
    build_filter,
    words_of,
)

QUESTION = (
    "A baker sells thirty loaves on Monday and twice as many on Tuesday; how many loaves does she sell in "
    "the two days together?"
)
SHORT = "Which planet of ours is nearest to the sun?"
ROWS = [
    {"question": QUESTION, "choices": {"text": ["ninety", "sixty"]}},
    {"question": SHORT},
    {"question": "Why?"},
]


def sentence(generator: random.Random, words: int = 30) -> str:
    return " ".join("".join(generator.choices("abcdefghijklmnop", k=5)) for _ in range(words))


@pytest.fixture
def built() -> SuiteFilter:
    return build_filter("bakery", ROWS, {"task": "lock"})


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        f"Question: {QUESTION}\nAnswer: ninety",
        QUESTION.upper().replace(";", " --").replace(" ", "\n  "),
        f"Q: {SHORT} A: Mercury",
    ],
)
def test_a_row_is_found_in_a_longer_text_whatever_its_case_and_punctuation(
    text: str, built: SuiteFilter
) -> None:
    check = ContaminationCheck([built])
    found = check.find("train.jsonl, line 3", {"messages": [{"role": "user", "content": text}]})
    assert found is not None
    assert (found.place, found.suite) == ("train.jsonl, line 3", "bakery")
    assert found.words in " ".join(words_of(text))


@pytest.mark.parametrize(
    "text", ["Why?", "A baker sells thirty loaves on Monday.", "Which planet is nearest?", "", "ninety"]
)
def test_a_text_that_shares_few_words_is_clean(text: str, built: SuiteFilter) -> None:
    check = ContaminationCheck([built])
    assert check.find("here", {"text": text}) is None
    assert (check.report.rows, check.report.contaminated) == (1, 0)


def test_rows_that_are_too_short_to_be_found_are_counted(built: SuiteFilter) -> None:
    assert (built.num_rows, built.short_rows) == (2, 1)


def test_words_that_many_rows_share_are_no_row() -> None:
    preamble = "Read the passage below with care and then pick the one answer that fits best of all four."
    generator = random.Random(1)
    rows = [{"text": preamble}] * 20 + [{"text": sentence(generator)} for _ in range(3)]
    built = build_filter("quiz", rows, {})
    assert built.found_in(preamble) is None
    assert built.found_in(rows[-1]["text"]) is not None
    assert (built.num_rows, built.short_rows) == (3, 20)


def test_characters_without_spaces_are_words_of_their_own() -> None:
    text = "面包师星期一卖出三十个面包星期二卖出两倍"
    assert len(words_of(text)) == len(text)
    assert build_filter("zh", [{"q": text}], {}).found_in(f"问题:{text}?") is not None


def test_the_false_positive_rate_of_the_filter_is_the_stated_one() -> None:
    generator = random.Random(2)
    inside = [generator.getrandbits(64) for _ in range(2000)]
    bloom = BloomFilter.of(inside, len(inside), 0.01)
    assert all(one in bloom for one in inside)
    claimed = sum(generator.getrandbits(64) in bloom for _ in range(40_000)) / 40_000
    assert bloom.rate == pytest.approx(0.01, rel=0.1)
    assert claimed == pytest.approx(0.01, rel=0.2)


def test_a_small_filter_has_the_stated_rate_too() -> None:
    generator = random.Random(4)
    inside = [generator.getrandbits(64) for _ in range(40)]
    bloom = BloomFilter.of(inside, len(inside), 1e-4)
    assert all(one in bloom for one in inside)
    claimed = sum(generator.getrandbits(64) in bloom for _ in range(200_000)) / 200_000
    assert claimed <= 2e-4  # places in arithmetic progression: 8e-4


@pytest.mark.slow  # a million rows
def test_a_large_suite_stays_within_a_megabyte_at_one_in_a_million() -> None:
    generator = random.Random(3)
    words = ["".join(generator.choices("abcdefghijklmnop", k=5)) for _ in range(5000)]
    rows = [{"q": " ".join(generator.choices(words, k=22))} for _ in range(40_000)]
    built = build_filter("large", rows, {})
    assert len(built.bloom.bits) <= MAX_BYTES
    assert built.rate <= 1.1e-6
    assert built.grams_per_row < 8  # fewer of each row, so that all fit
    assert all(built.found_in(row["q"]) for row in rows[::4000])
    assert not any(built.found_in(" ".join(generator.choices(words, k=200))) for _ in range(50))


def test_a_filter_is_read_as_it_was_saved_and_named_by_its_content(
    built: SuiteFilter, tmp_path: Path
) -> None:
    built.save(tmp_path / "f.json")
    again = SuiteFilter.load(tmp_path / "f.json")
    assert again.digest == built.digest == build_filter("bakery", ROWS, {"task": "lock"}).digest
    assert again.found_in(QUESTION) == built.found_in(QUESTION) is not None
    assert build_filter("bakery", ROWS[:1], {"task": "lock"}).digest != built.digest


@pytest.mark.parametrize(
    "change",
    [
        {"bits": "?"},
        {"bits": ""},
        {"places": 0},
        {"places": 10**9},
        {"lengths": [1]},
        {"more": 1},
        {"suite": 3},
    ],
)
def test_a_filter_that_was_altered_is_refused(
    change: dict[str, object], built: SuiteFilter, tmp_path: Path
) -> None:
    file = tmp_path / "f.json"
    built.save(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(GymError, match="not a contamination filter") as caught:
        SuiteFilter.load(file)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_suites_are_named_with_commas_or_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def remembered(names: Any) -> list[SuiteFilter]:
        asked.append(names)
        return []

    monkeypatch.setattr("gym_fed.evaluation.contamination_check.filters_here", remembered)
    (tmp_path / "rows.jsonl").write_text('{"text": "water is wet"}\n')
    for words in (("tiny_cloze,tiny_choice",), ("tiny_cloze", "--against", " tiny_choice, tiny_cloze")):
        CliRunner().invoke(app, ["data", "show", str(tmp_path / "rows.jsonl"), "--against", *words])
    assert asked == [["tiny_cloze", "tiny_choice"]] * 2
    empty = CliRunner().invoke(app, ["data", "show", str(tmp_path / "rows.jsonl"), "--against", ","])
    assert getattr(empty.exception, "code", None) is ErrorCode.USAGE
