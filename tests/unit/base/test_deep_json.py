"""JSON of models and data from anybody, with ten thousand brackets: refused by file, in every reader."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.downloads import ensure_model, missing_model
from gym_fed.base.files import licence_of
from gym_fed.base.modeling.adapters import read_adapter
from gym_fed.base.modeling.processors import is_vision_model
from gym_fed.base.modeling.weight_count import prequantised
from gym_fed.base.models import load_model, load_tokenizer, nano_path
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import parse_overrides
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import MAX_BYTES, MAX_DEPTH, read_object
from gym_fed.data.dataset_info import read_dataset_info
from gym_fed.data.files import cell_value
from gym_fed.data.formats.base import BadRow, parsed
from gym_fed.export.source import open_source
from gym_fed.interop.flags import _annotation, _bracketed
from gym_fed.interop.llamafactory.compute import _reads_images, _zero
from gym_fed.interop.llamafactory.rows import _has_template
from gym_fed.interop.llamafactory.translation import Translator
from gym_fed.training.planning.sizes import count_model

DEEP = '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"


def folder_with(tmp_path: Path, name: str) -> str:
    """gym-nano with one file that is nested too deeply."""
    folder = tmp_path / "model"
    shutil.copytree(nano_path(), folder)
    (folder / name).write_text(DEEP)
    return str(folder)


READERS: dict[str, list[Callable[[str], Any]]] = {
    "config.json": [load_model, open_source, prequantised, is_vision_model, count_model],
    "adapter_config.json": [
        load_model,
        open_source,
        missing_model,
        lambda name: ensure_model(name, consent=bool),
        lambda name: read_adapter(name, Path(name)),
    ],
    "tokenizer_config.json": [load_tokenizer],
    "tokenizer.json": [load_tokenizer],
    "generation_config.json": [load_model],
}


@pytest.mark.parametrize(
    ("file", "number"),
    [(file, number) for file, readers in READERS.items() for number in range(len(readers))],
)
def test_a_models_file_that_is_nested_too_deeply_is_refused_by_name(
    tmp_path: Path, file: str, number: int
) -> None:
    folder = folder_with(tmp_path, file)
    with pytest.raises(GymError) as raised:
        READERS[file][number](folder)
    assert raised.value.code is ErrorCode.MODEL_INVALID
    assert folder in raised.value.message
    assert raised.value.hint


def test_a_depth_that_python_reads_and_its_readers_do_not_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for depth in (MAX_DEPTH, MAX_DEPTH + 1, 900):
        file.write_text('{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}")
        if depth == MAX_DEPTH:
            assert "a" in read_object(file)
            continue
        with pytest.raises(GymError, match=r"config\.json cannot be read: nested too deeply"):
            read_object(file)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[1]", "not a mapping"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "cannot be read"),
        (b" " * (MAX_BYTES + 1), "larger than"),
    ],
)
def test_what_is_no_bounded_object_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(GymError, match=why):
        read_object(tmp_path / "config.json")


def test_files_of_a_llamafactory_job_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(DEEP)
    (tmp_path / "ds_z3.json").write_text(DEEP)
    for act in (lambda: read_dataset_info(tmp_path), lambda: _zero(str(tmp_path / "ds_z3.json"))):
        with pytest.raises(GymError, match="nested too deeply") as raised:
            act()
        assert raised.value.code is ErrorCode.CONFIG_INVALID


def test_a_llamafactory_jobs_model_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    translator = Translator({})
    translator.result.values["model"] = folder_with(tmp_path, "config.json")
    with pytest.raises(GymError, match="nested too deeply"):
        _reads_images(translator)
    folder = Path(translator.result.values["model"])
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(DEEP)
    with pytest.raises(GymError, match="nested too deeply"):
        _has_template(str(folder))


def test_cells_flags_and_cards_that_are_nested_too_deeply_are_no_values(tmp_path: Path) -> None:
    brackets = "[" * 1_500
    assert cell_value("messages", brackets) == brackets
    with pytest.raises(BadRow):
        parsed(brackets, "tools")
    with pytest.raises(GymError):
        _bracketed(brackets)
    (tmp_path / "README.md").write_text(f"---\nlicense: {brackets}\n---\n")
    assert licence_of(tmp_path) == ""


@pytest.mark.parametrize(
    "text", ["[" * 200 + "]" * 200, "{a: &x [*x]}", "[&a [1, 2], &b [*a, *a], [*b, *b]]"]
)
def test_a_value_of_the_command_line_that_repeats_or_nests_itself_is_refused(text: str) -> None:
    with pytest.raises(GymError, match=r"aliases \(\*\) are not supported|nested too deeply") as raised:
        _bracketed(text)
    assert raised.value.code is ErrorCode.USAGE
    with pytest.raises(GymError, match="the value is not YAML"):
        parse_overrides([f"data={text}"])


def test_a_key_of_the_command_line_with_thousands_of_dots_is_refused() -> None:
    key = ".".join(["a"] * 3_000)
    with pytest.raises(GymError, match="at most 64 dots") as raised:
        parse_overrides([f"{key}=1"])
    assert len(raised.value.message) < 300
    with pytest.raises(GymError, match="at most 64 dots"):
        _annotation(f"model.{key}", TrainingConfig)
