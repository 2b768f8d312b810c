"""Patterns of an untrusted tokenizer.json are tried in the child process before the tokenizer is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.imports.gguf import tokenizer as gguf_tokenizer
from gym_fed.base.imports.gguf.header import Header
from gym_fed.base.modeling import split_patterns
from gym_fed.base.modeling.known_splits import KNOWN
from gym_fed.base.modeling.split_patterns import require_quick_splits
from gym_fed.base.models import load_tokenizer, nano_path
from gym_fed.core.bounded import pool
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.plain_tokenizer import plain_tokenizer

SLOW = r".+.+(?<=\x00)(?=x|y)"
"""Takes n^3 steps for a text of n characters."""
GIVEN_UP = "(a|a|aa)+$"


def model_with(pattern: str, folder: Path, key: str = "pre_tokenizer") -> Path:
    shutil.copytree(nano_path(), folder)
    file = folder / "tokenizer.json"
    part: dict[str, Any] = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    if key == "normalizer":
        part = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: part}))
    return folder


@pytest.mark.parametrize("key", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize(
    ("pattern", "problem"), [(SLOW, "takes longer than 2 s"), (GIVEN_UP, "fails: .*retry-limit")]
)
def test_a_tokenizers_pattern_that_takes_for_ever_is_refused_by_name_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, problem: str, key: str
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
    "pattern", [r"(?:\p{L}\p{M}*)+|\s+", r"\d{1,3}(?=(?:\d{3})*\b)", r"(?i:it's)|\w+\s*"]
)
def test_unknown_patterns_that_end_in_time_are_accepted(pattern: str) -> None:
    require_quick_splits(json.dumps({"Regex": pattern}), "ordinary")


def test_too_many_or_too_long_patterns_are_refused() -> None:
    for patterns in ([f"(?:a|{number})+" for number in range(33)], ["(?:a|b)*" + "a" * 4000]):
        with pytest.raises(GymError, match="more than 32 patterns, or one of more than 4,000 characters"):
            require_quick_splits(json.dumps([{"Regex": one} for one in patterns]), "hostile")
