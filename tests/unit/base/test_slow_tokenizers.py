"""Patterns of an untrusted tokenizer.json are tried in the child process before the tokenizer is loaded."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.imports.gguf import tokenizer as gguf_tokenizer
from gym_fed.base.imports.gguf.header import Header
from gym_fed.base.modeling import split_patterns
from gym_fed.base.modeling.split_patterns import KNOWN, require_quick_splits
from gym_fed.base.models import load_tokenizer, nano_path
from gym_fed.core.bounded import pool
from gym_fed.core.bounded.patterns import search_texts
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.plain_tokenizer import plain_tokenizer

SLOW = r"\d+\d+(?<=\x00)(?=x|y)"
"""Takes n^3 steps for n digits."""
GIVEN_UP = "(a|a|aa)+$"


def model_with(pattern: str, folder: Path, key: str = "pre_tokenizer") -> Path:
    shutil.copytree(nano_path(), folder)
    file = folder / "tokenizer.json"
    kind = {"type": "Split", "behavior": "Isolated", "invert": False}
    if key == "normalizer":
        kind = {"type": "Replace", "content": ""}
    part: dict[str, Any] = {**kind, "pattern": {"Regex": pattern}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: part}))
    return folder


@pytest.mark.parametrize(
    ("key", "pattern", "problem"),
    [
        ("pre_tokenizer", SLOW, "takes longer than 2 s"),
        ("normalizer", GIVEN_UP, "fails: .*retry-limit"),
        pytest.param("normalizer", SLOW, "takes longer than 2 s", marks=pytest.mark.slow),
        pytest.param("pre_tokenizer", GIVEN_UP, "fails: .*retry-limit", marks=pytest.mark.slow),
    ],
)
def test_a_tokenizers_pattern_that_takes_for_ever_is_refused_by_name_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, pattern: str, problem: str
) -> None:
    monkeypatch.setattr(pool, "SECONDS", 2.0)
    folder = model_with(pattern, tmp_path / "hostile", key)
    with pytest.raises(
        GymError, match=f"hostile: its tokenizer.json has the pattern .* which {problem}"
    ) as refused:
        load_tokenizer(str(folder))
    assert refused.value.code is ErrorCode.MODEL_INVALID
    assert "tokenizer.json" in refused.value.hint


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: plain_tokenizer(folder, "LlamaForCausalLM"),
        lambda folder: gguf_tokenizer._backend(
            Header(folder / "in.gguf", {gguf_tokenizer.WHOLE: (folder / "tokenizer.json").read_text()}, {}),
            ["a"],
        ),
    ],
    ids=["serving", "gguf"],
)
def test_every_loader_of_tokenizers_tries_the_patterns(tmp_path: Path, act: Callable[[Path], Any]) -> None:
    with pytest.raises(GymError, match=r"fails: .*retry-limit"):
        act(model_with(GIVEN_UP, tmp_path / "hostile"))


def test_a_key_with_escaped_letters_is_found() -> None:
    with pytest.raises(GymError, match=r"fails: .*retry-limit"):
        require_quick_splits(r'{"\u0052e\u0067ex" : "(a|a|aa)\u002b$"}', "hostile")


def test_known_and_linear_patterns_need_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_called(*_: Any, **__: Any) -> None:
        raise AssertionError("a child process was used")

    monkeypatch.setattr(split_patterns, "evaluate", not_called)
    linear = [r" {2,}", r"\s+", r"\p{N}{1,3}", r"[\r\n]", r"[0-9][0-9][0-9]", "[^\\n]+"]
    require_quick_splits(json.dumps([{"Regex": one} for one in (*KNOWN, *linear)]), "ordinary")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:\p{L}\p{M}*)+|\s+",
        pytest.param(r"\d{1,3}(?=(?:\d{3})*\b)", marks=pytest.mark.slow),
        pytest.param(r"(?i:it's)|\w+\s*", marks=pytest.mark.slow),
    ],
)
def test_unknown_patterns_that_end_in_time_are_accepted(pattern: str) -> None:
    require_quick_splits(json.dumps({"Regex": pattern}), "ordinary")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:a|b)+:",
        pytest.param(r"\s+$", marks=pytest.mark.slow),
        pytest.param(".{999}(?:a|b)+:", marks=pytest.mark.slow),
    ],
)
def test_a_pattern_whose_time_grows_with_the_square_of_the_text_is_refused(pattern: str) -> None:
    with pytest.raises(
        GymError, match=r"which fails: takes \d+ times as long for 4 times the text"
    ) as refused:
        require_quick_splits(json.dumps({"Regex": pattern}), "hostile")
    assert refused.value.code is ErrorCode.MODEL_INVALID


def test_a_pattern_that_takes_longer_for_digits_than_published_ones_is_refused() -> None:
    pattern = "|".join(rf"(?=(\d{{{count}}})+(?!\d)[xy])" for count in range(1, 12)) + r"|\d"
    with pytest.raises(GymError, match=r"which fails: takes \d+\.\d s for a run of 4,096 digits"):
        require_quick_splits(json.dumps({"Regex": pattern}), "hostile")


@pytest.mark.slow  # six seconds of searches in runs of digits
def test_published_patterns_that_group_digits_from_the_right_are_accepted() -> None:
    patterns = [r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", r"(?=(\d{3})+(?!\d))"]
    require_quick_splits(json.dumps([{"Regex": one} for one in patterns]), "ordinary")


def test_a_quadratic_search_that_takes_few_milliseconds_for_short_texts_is_refused() -> None:
    pattern = 2 * string.ascii_letters + "[^!]*[!?]"
    with pytest.raises(GymError, match=r"takes \d+ times as long for 4 times the text"):
        require_quick_splits(json.dumps({"Regex": pattern}), "hostile")


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(pattern, marks=() if number % 8 == 0 else pytest.mark.slow)
        for number, pattern in enumerate(sorted(KNOWN))
    ],
)
def test_published_patterns_would_pass_the_trial(pattern: str) -> None:
    search_texts(pattern)


@pytest.mark.parametrize("pattern", [".{99999}", "[ab]{3000}", "[ab]{3000,}", "x(?:a){,1000}"])
def test_a_pattern_that_repeats_a_thousand_times_is_refused_by_its_count(pattern: str) -> None:
    with pytest.raises(GymError, match=r"whose \{,?\d+,?\} is over 999"):
        require_quick_splits(json.dumps({"Regex": pattern}), "hostile")


def test_braces_that_are_no_counts_are_accepted() -> None:
    require_quick_splits(json.dumps([{"Regex": r"\x{10000}(?:a)"}, {"Regex": r"(?:a)\{1000\}"}]), "ordinary")


@pytest.mark.parametrize("files", [["tokenizer.json", "tokenizer.4.0.0.json"], {"tokenizer.4.0.0.json": 1}])
def test_a_config_that_names_another_file_of_the_tokenizer_is_refused_by_its_key(
    tmp_path: Path, files: Any
) -> None:
    folder = model_with(r"\s+", tmp_path / "hostile")
    (folder / "tokenizer.json").rename(folder / "tokenizer.4.0.0.json")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"fast_tokenizer_files": files}))
    with pytest.raises(GymError, match=r"tokenizer_config\.json has fast_tokenizer_files") as refused:
        load_tokenizer(str(folder))
    assert (refused.value.code, "remove the key" in refused.value.hint) == (ErrorCode.MODEL_INVALID, True)


def test_the_pattern_of_a_tekken_file_is_tried(tmp_path: Path) -> None:
    folder = model_with(r"\s+", tmp_path / "hostile")
    (folder / "tokenizer.json").unlink()
    (folder / "tekken.json").write_text(json.dumps({"config": {"pattern": GIVEN_UP}, "vocab": []}))
    with pytest.raises(GymError, match=r"its tekken.json has the pattern .*retry-limit") as refused:
        load_tokenizer(str(folder))
    assert refused.value.code is ErrorCode.MODEL_INVALID


def test_too_many_or_too_long_patterns_are_refused() -> None:
    for patterns in ([f"(?:a|{number})+" for number in range(33)], ["(?:a|b)*" + "a" * 4000]):
        with pytest.raises(GymError, match="more than 32 patterns, or one of more than 4,000 characters"):
            require_quick_splits(json.dumps([{"Regex": one} for one in patterns]), "hostile")
