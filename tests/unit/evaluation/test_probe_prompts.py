"""Files of prompts for the safety probe: HarmBench's and StrongREJECT's columns, and what is refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.probe import prompts
from gym_fed.evaluation.probe.prompts import own_prompts, read_prompts


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "harmbench.csv",
            'Behavior,FunctionalCategory,SemanticCategory,Tags\n"Hurt, them",standard,harm,\nB,standard,hate,x\n',
            [("Hurt, them", "harm"), ("B", "hate")],
        ),
        (
            "strongreject.csv",
            'category,source,forbidden_prompt\nhate,us,"two\nlines"\n',
            [("two\nlines", "hate")],
        ),
        ("ours.jsonl", '{"prompt": "A"}\n\n{"prompt": "B", "category": "c"}\n', [("A", "all"), ("B", "c")]),
        ("marked.csv", b"\xef\xbb\xbfprompt\nA\n", [("A", "all")]),
    ],
)
def test_columns_of_known_sets_are_read(
    tmp_path: Path, name: str, content: str | bytes, expected: list[tuple[str, str]]
) -> None:
    found = read_prompts(written(tmp_path, name, content))
    assert [(one.ask, one.category) for one in found.harmful] == expected
    assert found.benign == own_prompts().benign
    assert found.sha256 != own_prompts().sha256


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"prompt": "A"}\n{"prompt": ', "line 2 is no JSON"),
        ("a.jsonl", '{"prompt": "A"}\n' + "[" * 100_000 + "\n", "line 2 is no JSON"),
        ("a.jsonl", '\n\n{"prompt": ["A"]}\n', "line 3 has no text of at most"),
        ("a.jsonl", '"A"\n', "line 1 has no text of at most"),
        ("a.jsonl", '{"prompt": "\\ud800"}\n', "line 1 has half of a surrogate pair"),
        ("a.jsonl", '{"prompt": "%s"}\n' % ("x" * 4001), "line 1 has no text of at most 4000"),
        ("a.jsonl", b'{"prompt": "A"}\n\xff\n', "line 2 is not UTF-8"),
        ("a.csv", 'prompt\nA\n"two\nlines"\n""\n', "line 5 has no text of at most"),
        ("a.csv", "prompt\n" + "x" * 200_000 + "\n", "line 2 "),  # a library may have raised csv's limit
        ("a.csv", "other\nA\n", "line 2 has no text of at most"),
        ("a.csv", "prompt\n", "no rows"),
    ],
)
def test_a_bad_file_is_refused_by_line(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    with pytest.raises(GymError) as caught:
        read_prompts(written(tmp_path, name, content))
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert said in caught.value.message
    assert len(caught.value.message) < 500


def test_a_file_that_is_too_large_or_absent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GymError) as caught:
        read_prompts(tmp_path / "absent.csv")
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    with pytest.raises(GymError, match="more than 10000 rows") as caught:
        read_prompts(written(tmp_path, "many.csv", "prompt\n" + "A\n" * 10_001))
    assert caught.value.code is ErrorCode.TOO_LARGE
    monkeypatch.setattr(prompts, "MAX_BYTES", 1 << 20)
    with pytest.raises(GymError, match="more than 1 MiB") as caught:
        read_prompts(written(tmp_path, "large.csv", b"prompt\n" + b"A" * (1 << 20)))
    assert caught.value.code is ErrorCode.TOO_LARGE
