"""Sums of the usage log, and the removal of a variant and its callers from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.keys import KeyFile
from gym_fed.serving.http.usage_log import UsageLog, Use, forget_variant, sum_usage

OCTOBER, NOVEMBER = 1_791_000_000, 1_794_000_000
"""Unix seconds in these months of 2026."""


def line(at: float, key: str, user: str | None = None, model: str = "base:ada", tokens: int = 3) -> str:
    shown: dict[str, Any] = {"at": at, "version": "sha256:0", "model": model, "tokens": tokens + 1}
    shown |= {"prompt_tokens": tokens, "completion_tokens": 1, "key": key, "url": "/v1/chat/completions"}
    return json.dumps({**shown, "user": user} if user else shown) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "usage.jsonl"
    lines = [
        line(NOVEMBER, "ada", "=1+1"),
        line(NOVEMBER + 5, "ada", "=1+1", tokens=4),
        line(OCTOBER, "bo", model="base"),
        "[]\n",
        line(NOVEMBER, "bo", model="base:other"),
        '{"at": 1e400, "key": "x"}\n',
    ]
    file.write_text("".join(lines) + '{"torn')
    return file


def gym(*words: object) -> Any:
    return CliRunner().invoke(app, ["api", "usage", *map(str, words)])


def test_usage_is_summed_by_month_key_and_user_and_no_line_is_lost_silently(log: Path) -> None:
    report = sum_usage(log)
    assert [(one.month, one.key, one.user, one.requests, one.tokens) for one in report.sums] == [
        ("2026-10", "bo", "", 1, 4),
        ("2026-11", "ada", "=1+1", 2, 9),
        ("2026-11", "bo", "", 1, 4),
    ]
    assert report.unreadable == 3
    assert [one.key for one in sum_usage(log, "2026-10").sums] == ["bo"]
    with pytest.raises(GymError) as caught:
        sum_usage(log.with_name("none"))
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND


def test_a_name_is_no_formula_of_a_spreadsheet(log: Path) -> None:
    done = gym(log, "--csv", "--month", "2026-11")
    assert done.stdout.splitlines()[:2] == [
        "month,key,user,requests,prompt_tokens,completion_tokens,tokens",
        "2026-11,ada,'=1+1,2,7,2,9",
    ]
    assert "3 lines" in done.stderr
    assert json.loads(gym(log, "--json").stdout)["sums"][0]["key"] == "bo"
    assert "2026-10" in gym(log).stdout
    for wrong in (["--month", "2026-13"], ["--csv", "--json"]):
        assert gym(log, *wrong).exit_code != 0


def test_a_name_drives_neither_the_terminal_nor_the_encoding_of_a_csv(log: Path) -> None:
    line = {"at": 1796000000, "key": "ada", "user": "\x1b]0;x\x07\ud800", "tokens": 1}
    log.write_text(json.dumps({**line, "prompt_tokens": 1, "completion_tokens": 0, "model": "m"}) + "\n")
    done = gym(log, "--csv")
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert r"\x1b]0;x\x07\ud800" in done.stdout


def test_a_removed_variant_leaves_tokens_for_royalties_and_no_name(log: Path) -> None:
    before = log.read_bytes()
    assert forget_variant(log, "ada") == 2
    after = log.read_bytes()
    assert len(after) == len(before), "a server that appends meanwhile loses nothing"
    assert b"base:ada" not in after
    assert b"=1+1" not in after
    assert [one for one in after.splitlines() if b"other" in one] == [
        one for one in before.splitlines() if b"other" in one
    ]
    assert sum(one.tokens for one in sum_usage(log).sums) == 17
    assert sum_usage(log).unreadable == 3
    assert forget_variant(log, "ada") == 0


def test_a_short_name_is_removed_without_a_longer_line(tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    file.write_text(line(NOVEMBER, "a", model=":a").rstrip("\n"))
    size = file.stat().st_size
    assert forget_variant(file, "a") == 1
    assert file.stat().st_size == size
    assert json.loads(file.read_text())["model"] == ""


def test_an_open_log_goes_on_after_the_removal(tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    log = UsageLog(file, "sha256:0")
    use = Use("/v1", "base:ada", "ada", "u", 3, 1)
    log.write(use)
    assert forget_variant(file, "ada") == 1
    log.write(use)
    log.close()
    assert [json.loads(one)["model"] for one in file.read_text().splitlines()] == ["base", "base:ada"]


def test_keys_forget_a_variant(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    keys.add("only", base=False, variants=("ada",))
    keys.add("more", base=False, variants=("ada", "bo"))
    keys.add("other", base=False, variants=("bo",))
    assert keys.forget_variant("ada") == (["only"], ["more"])
    assert [(key.name, key.variants) for key in keys.all()] == [("more", ("bo",)), ("other", ("bo",))]
    assert keys.forget_variant("ada") == ([], [])
