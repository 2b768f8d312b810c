"""The next command, as train, chat, eval, export and variant create print it last."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from gym_fed.cli.next_command import after_chat, after_create, after_eval, after_webui, print_next
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.export.choice import format_named


def test_a_chat_leads_to_an_evaluation_or_to_a_variant(tmp_path: Path) -> None:
    assert (
        after_chat("gym-nano", None, None) == "gym variant create --base gym-nano --data my.jsonl --user ada"
    )
    assert after_chat("gym-nano", "bo", None) == "gym eval gym-nano --variant bo --suite tiny"
    run = tmp_path / "my run"
    run.mkdir()
    assert shlex.split(after_chat(str(run), None, None)) == ["gym", "eval", str(run), "--suite", "tiny"]


def test_an_evaluation_leads_to_an_export_of_what_it_measured() -> None:
    assert after_eval("runs/a", None, None) == "gym export runs/a -o exported/a"
    assert after_eval("gym-nano:bo", None, None) == "gym export gym-nano:bo -o exported/bo"
    words = after_eval("gym-nano", "bo", Path("own"))
    assert words == "gym export gym-nano --variant bo --variants own -o exported/bo"


def test_a_variant_is_talked_to_if_it_was_taught_chats_and_served_otherwise() -> None:
    assert after_create("gym-nano", "bo", None, is_chat=True) == "gym chat gym-nano --variant bo"
    assert after_create("b", "bo", Path("own"), is_chat=False) == "gym api --base b --variants own"


@pytest.mark.parametrize("name", EXPORT_FORMATS.own())
def test_every_format_says_how_its_file_is_used(name: str) -> None:
    path = Path("out/file name")
    chosen = EXPORT_FORMATS.new(name)
    assert "file name" in chosen.use(path)
    if not chosen.use(path).startswith(("load ", "copy ")):
        assert str(path) in shlex.split(chosen.use(path))


def test_the_last_line_is_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    print_next("gym chat a")
    print_next("")
    assert capfd.readouterr() == ("", "next: gym chat a\n")


@pytest.mark.parametrize("name", ["q8_0", "Q4_K_M"])
def test_a_quantization_where_a_format_belongs_is_answered_by_its_flag(name: str) -> None:
    with pytest.raises(GymError, match="is not a format, but a quantization of format gguf") as caught:
        format_named(name)
    assert caught.value.code is ErrorCode.USAGE
    assert caught.value.hint == f"--format gguf --quantization {name.lower()}"


def test_a_workbench_leads_to_its_newest_run_or_to_training(tmp_path: Path) -> None:
    assert after_webui(tmp_path / "none") == "gym train --model gym-nano --data my.jsonl"
    for age, (name, beside) in enumerate([("b", "config.json"), ("a", "adapter_config.json"), ("c", "x")]):
        folder = tmp_path / "deep" / name
        folder.mkdir(parents=True)
        for file in (beside, "result.json"):
            (folder / file).write_text("{}")
            os.utime(folder / file, (age, age))
    assert after_webui(tmp_path) == f"gym chat {tmp_path / 'deep' / 'a'}", "c has no model"
