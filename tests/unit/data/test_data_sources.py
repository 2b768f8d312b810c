"""Where rows come from: files of every kind, folders, patterns, URLs, the hub's cache; bad rows are named by place."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pydantic import ValidationError

from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows
from gym_fed.data.reading import iter_rows
from gym_fed.data.sources import source_rows

ROWS = [{"instruction": f"say {i}", "input": "", "output": f"it is {i}"} for i in range(5)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def expected(rows: list[dict[str, str]] = ROWS) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["output"]},
            ]
        }
        for row in rows
    ]


def write_csv(file: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "b.jsonl").write_text(JSONL)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(JSONL.encode()))
    write_csv(tmp_path / "d.csv", ROWS)
    write_csv(tmp_path / "e.tsv", ROWS, "\t")
    write_parquet(tmp_path / "f.parquet", ROWS)
    for file in sorted(tmp_path.iterdir()):
        assert load_rows(file) == expected(), file.name


def test_nested_columns_read_alike_from_parquet_and_csv(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows: list[dict[str, Any]] = [{"messages": chat, "label": True}, {"messages": chat, "label": False}]
    found = load_rows(write_parquet(tmp_path / "a.parquet", rows))
    assert [row["label"] for row in found] == [True, False]
    cells = [{"messages": json.dumps(chat), "label": row["label"]} for row in rows]
    assert load_rows(write_csv(tmp_path / "a.csv", cells)) == found


def test_folders_and_patterns_stand_for_their_data_files_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "deep" / "c.txt").write_text("c")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / ".hidden.jsonl").write_text("not read")
    (tmp_path / "README.md").write_text("not read")
    assert [row["text"] for row in load_rows(tmp_path)] == ["a", "b", "c"]
    assert [row["text"] for row in load_rows(tmp_path / "*.jsonl")] == ["a", "b"]
    for nothing in (tmp_path / "*.csv", tmp_path / "deep" / "none"):
        with pytest.raises(GymError) as caught:
            load_rows(nothing)
        assert caught.value.code is ErrorCode.FILE_NOT_FOUND


def test_urls_are_read_and_named_in_messages(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/data-sources/a.jsonl", JSONL.encode())
    memory.pipe("/data-sources/b.jsonl", b'{"text": "fine"}\n{"text": 3}\n')
    assert load_rows("memory://data-sources/a.jsonl") == expected()
    (tmp_path / "a.jsonl").write_text(JSONL)
    assert load_rows(f"file://{tmp_path}/a.jsonl") == expected()
    with pytest.raises(GymError, match=r"^memory://data-sources/b.jsonl:2: 'text' is int"):
        load_rows("memory://data-sources/*.jsonl")


def test_a_protocol_without_its_package_and_an_unknown_one_have_errors_of_their_own() -> None:
    with pytest.raises(GymError) as caught:
        load_rows("nowhere://bucket/a.jsonl")
    assert caught.value.code is ErrorCode.USAGE
    fsspec.register_implementation("absent", "no_such_package.Fs", errtxt="install no_such_package")
    with pytest.raises(GymError, match="install no_such_package") as caught:
        load_rows("absent://bucket/a.jsonl")
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "x"},\n\n {"text": 3}]', "a.json:3: row 2: 'text' is int"),
        ("a.json", b'[{"text": "x"}\n {"text": "y"}]', "a.json:2:2: not valid JSON: Expecting ','"),
        ("a.json", b'[{"text": "x"}] 5', "a.json:1:17: not valid JSON: Extra data"),
        ("a.jsonl", b'\n\n{"text": "x"}\n{"text": ""}\n', "a.jsonl:4: 'text' is empty"),
        ("a.jsonl", b'\n[{"text": "x"},\n{"text": ""}]\n', "a.jsonl:3: row 2: 'text' is empty"),
        ("a.csv", b'text\nx\n"y\nz"\n\xff\n', "a.csv: not UTF-8"),
        ("a.csv", b"text,n\nx,1\ny\n", "a.csv:3: fewer cells than the header"),
        ("a.csv", b'text\n"x\n', "a.csv:2: not valid CSV"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9], "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read"),
        ("a.parquet", b"PAR1 no parquet PAR1", "a.parquet: not a readable Parquet file"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GymError) as caught:
        load_rows(tmp_path / name)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert message in caught.value.message
    assert caught.value.hint


def test_rows_come_as_they_are_read_not_after_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "first"}\nnot json\n')
    rows = iter_rows(file)
    assert next(rows) == (f"{file}:1", {"text": "first"})
    with pytest.raises(GymError, match=":2: not valid JSON"):
        next(rows)


def test_columns_rename_what_a_file_calls_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "2+2", "answer": "4"}\n')
    source = DataConfig(path=str(file), columns={"prompt": "question"})
    assert [row for _, row in source_rows(source)] == [{"prompt": "2+2", "answer": "4"}]
    with pytest.raises(GymError, match="has no column 'ask'"):
        list(source_rows(DataConfig(path=str(file), columns={"prompt": "ask"})))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "give one of path, tasks, name, hub and dataset"),
        ({"path": "a", "hub": "b"}, "give one of path, tasks, name, hub and dataset"),
        ({"dataset": "a"}, "needs dataset_info"),
        ({"path": "a", "split": "train"}, "split is for hub"),
        ({"tasks": ["copy"], "num_examples": 1, "format": "text"}, "format is for path and hub"),
        ({"path": "a", "dataset_info": "b"}, "dataset_info is for dataset"),
        ({"hub": "https://x"}, "hub"),
    ],
)
def test_keys_that_nothing_would_read_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DataConfig(**keys)


def test_a_path_in_python_may_be_a_path_and_a_url_keeps_its_slashes() -> None:
    assert DataConfig(path=Path("a/b")).path == "a/b"  # type: ignore[arg-type]
    assert DataConfig(path="s3://bucket/a").path == "s3://bucket/a"


def test_a_hub_dataset_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--someone--words"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "train.jsonl").write_text(JSONL)
    (snapshot / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    rows = [row for _, row in source_rows(DataConfig(hub="someone/words", num_examples=3))]
    assert rows == expected()[:3]
    assert len(list(source_rows(DataConfig(hub="someone/words", split="test")))) == 1
    with pytest.raises(GymError, match="validation") as caught:
        list(source_rows(DataConfig(hub="someone/words", split="validation")))
    assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize(
    "place", ["{private}/*.jsonl", "../../../private/*.jsonl", "file://{private}/*.jsonl"]
)
def test_the_card_of_a_hub_dataset_names_no_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    private = tmp_path / "private"
    private.mkdir()
    (private / "diary.jsonl").write_text(JSONL)
    repository = tmp_path / "cache" / "datasets--someone--words"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "train.jsonl").write_text(JSONL)
    path = place.format(private=private)
    if path.startswith(".."):
        path = f"../{path}"
    (snapshot / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n"
    )
    with pytest.raises(GymError, match="which is not one of its files") as caught:
        list(source_rows(DataConfig(hub="someone/words")))
    assert caught.value.code is ErrorCode.DATA_INVALID


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("hf://datasets/someone/words@0123/train.jsonl", True),
        ("hf://datasets/Someone/Words@0123/train.jsonl", True),
        ("zip://train.jsonl::hf://datasets/someone/words@0123/all.zip", True),
        ("hf://datasets/someone/words-private@0123/train.jsonl", False),
        ("hf://datasets/someone/words@0123/../../other/words/train.jsonl", False),
        ("file:///etc/passwd::hf://datasets/someone/words@0123/train.jsonl", False),
        ("https://elsewhere.example/train.jsonl", False),
        ("/etc/passwd", False),
    ],
)
def test_a_streamed_hub_dataset_is_read_from_its_own_files_alone(path: str, is_own: bool) -> None:
    from gym_fed.data.hub import _require_own_files

    if is_own:
        return _require_own_files("someone/words", None, {"train": [path]})
    with pytest.raises(GymError, match="which is not one of its files"):
        _require_own_files("someone/words", None, {"train": [path]})


def test_a_hub_dataset_that_is_nowhere_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    with pytest.raises(GymError, match="someone/words: is not on this machine") as caught:
        list(source_rows(DataConfig(hub="someone/words")))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "hf download --repo-type dataset someone/words" in caught.value.hint


def test_rows_that_a_run_cannot_use_are_named_by_their_file_long_after_reading(
    tmp_path: Path, tiny_base: Path
) -> None:
    from gym_fed import Trainer, TrainingConfig

    file = tmp_path / "a.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    file.write_text(json.dumps({"messages": chat}) + "\n\n" + json.dumps({"messages": chat, "tools": tools}))
    settings: dict[str, Any] = {"model": str(tiny_base), "data": [{"path": str(file)}], "max_steps": 1}
    with pytest.raises(GymError, match=f"{file}:3 has tools"):
        Trainer(TrainingConfig(**settings, output_dir=tmp_path / "run")).train()
    with pytest.raises(GymError, match=f"{file}:1 is a supervised row, but preference rows are needed"):
        Trainer(TrainingConfig(**settings, algorithm="dpo", output_dir=tmp_path / "dpo")).train()
