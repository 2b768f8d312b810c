"""LLaMA-Factory's dataset_info.json is read as it is; what lies where gym-fed cannot go is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.dataset_info import dataset_rows, read_dataset_info
from gym_fed.data.rows import kind_of
from gym_fed.data.sources import source_rows

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
NO = {"role": "assistant", "content": "no"}


def rows(tmp_path: Path, entry: dict[str, Any], *data: Any, name: str = "d.json") -> list[dict[str, Any]]:
    """What the dataset ``d`` of this entry holds, when its file holds ``data``."""
    (tmp_path / name).write_text(json.dumps(list(data)))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": {"file_name": name, **entry}}))
    source = DataConfig(dataset="d", dataset_info=tmp_path)
    return [row for _, row in source_rows(source)]


def test_alpaca_columns_are_found_under_their_names(tmp_path: Path) -> None:
    row = {"q": "hi", "a": "ho", "sys": "Be brief", "input": "not listed, so not read"}
    entry = {"columns": {"prompt": "q", "response": "a", "system": "sys"}}
    assert rows(tmp_path, entry, row) == [{"messages": [{"role": "system", "content": "Be brief"}, ASK, SAY]}]
    assert rows(tmp_path, {}, {"instruction": "hi", "input": "", "output": "ho"}) == [
        {"messages": [ASK, SAY]}
    ]


def test_sharegpt_tags_are_found_under_their_names(tmp_path: Path) -> None:
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "U", "assistant_tag": "A"}
    entry = {"formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags}
    talk = [{"who": "U", "what": "hi"}, {"who": "A", "what": "ho"}]
    assert rows(tmp_path, entry, {"talk": talk}) == [{"messages": [ASK, SAY]}]
    with pytest.raises(GymError, match=r"d.json:1: row 1: 'from' is 'B', which is not a known speaker"):
        rows(tmp_path, entry, {"talk": [*talk, {"who": "B", "what": "x"}]})


def test_ranking_and_kto_tag_give_pairs_and_judgements(tmp_path: Path) -> None:
    pair = {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]}
    alpaca = {"instruction": "hi", "chosen": "ho", "rejected": "no"}
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    assert rows(tmp_path, {"ranking": True, "columns": columns}, alpaca) == [pair]
    judged = {"formatting": "openai", "columns": {"messages": "messages", "kto_tag": "good"}}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    assert rows(tmp_path, {**judged, "tags": tags}, {"messages": [ASK, SAY], "good": False}) == [
        {"prompt": [ASK], "completion": [SAY], "label": False}
    ]


def test_a_lone_prompt_column_is_text_and_a_txt_file_has_a_row_a_line(tmp_path: Path) -> None:
    assert rows(tmp_path, {"columns": {"prompt": "body"}}, {"body": "words"}) == [{"text": "words"}]
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"d": {"file_name": "lines.txt", "columns": {"prompt": "text"}}})
    )
    assert [row for _, row in dataset_rows("d", tmp_path)] == [{"text": "one"}, {"text": "two"}]


def test_num_samples_draws_by_the_seed_and_repeats_when_there_are_too_few(tmp_path: Path) -> None:
    data = [{"body": f"t{i}"} for i in range(50)]
    entry = {"columns": {"prompt": "body"}, "num_samples": 10}
    drawn = rows(tmp_path, entry, *data)
    assert len(drawn) == 10
    assert drawn == rows(tmp_path, entry, *data)
    other = DataConfig(dataset="d", dataset_info=tmp_path, seed=1)
    assert [row for _, row in source_rows(other)] != drawn
    assert [r["text"] for r in rows(tmp_path, {**entry, "num_samples": 5}, *data[:2])] == [
        "t0",
        "t1",
        "t0",
        "t1",
        "t0",
    ]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"script_url": "x"}, "run the dataset's code"),
        ({"ms_hub_url": "a/b"}, "only on ModelScope"),
        ({"om_hub_url": "a/b"}, "only on Modelers"),
        ({}, "has no source"),
        ({"file_name": "d.json", "colums": {}}, "colums"),
        ({"file_name": "d.json", "formatting": "xml"}, "formatting"),
    ],
)
def test_entries_that_cannot_be_honoured_are_refused_by_name(
    tmp_path: Path, entry: dict[str, Any], problem: str
) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    with pytest.raises(GymError, match=problem) as caught:
        list(dataset_rows("mine", tmp_path))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "mine" in caught.value.message


def test_an_unknown_name_is_refused_with_close_ones_and_a_missing_column_by_its_row(tmp_path: Path) -> None:
    rows(tmp_path, {}, {"instruction": "a", "output": "b"})
    with pytest.raises(GymError, match="no dataset 'dd'") as caught:
        list(dataset_rows("dd", tmp_path / "dataset_info.json"))
    assert caught.value.hint == "such as d"
    with pytest.raises(GymError, match=r"row 1: has no column 'ask'"):
        rows(tmp_path, {"columns": {"prompt": "ask", "response": "b"}}, {"b": "x"})


@pytest.mark.shared
def test_every_entry_of_llama_factorys_own_file_is_read_or_refused_by_name(shared_folder: Path) -> None:
    folder = shared_folder / "data/llamafactory_demo"
    entries = read_dataset_info(folder)
    assert len(entries) == len(json.loads((folder / "dataset_info.json").read_text()))
    found: dict[str, tuple[int, str | None]] = {}
    for name, entry in entries.items():
        if entry.hf_hub_url is not None:  # not fetched here; that its columns are understood is
            continue
        if entry.file_name and (folder / entry.file_name).exists():
            read = [row for _, row in dataset_rows(name, folder)]
            found[name] = len(read), kind_of(read[0])
            continue
        with pytest.raises(GymError) as caught:
            list(dataset_rows(name, folder))
        expected = ErrorCode.FILE_NOT_FOUND if entry.file_name else ErrorCode.CONFIG_INVALID
        assert caught.value.code is expected, name
    assert found == {
        "identity": (91, "supervised"),
        "glaive_toolcall_en_demo": (300, "supervised"),
        "dpo_en_demo": (300, "preference"),
        "kto_en_demo": (300, "unpaired"),
        "c4_demo": (300, "supervised"),
    }
    tools = next(row for _, row in dataset_rows("glaive_toolcall_en_demo", folder))["tools"]
    assert tools[0]["function"]["name"] == "search_recipes"
