"""WebDataset shards and nested columns of Parquet: what a sample becomes, and archives that are refused."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows, shards
from gym_fed.data.formats.base import Raw
from gym_fed.data.reading import iter_rows

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def picture(color: str = "red", form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), color).save(buffer, form)
    return buffer.getvalue()


def shard(file: Path, members: list[tuple[str, bytes]], **more: Any) -> Path:
    with tarfile.open(file, "w:gz" if file.suffix == ".gz" else "w", **more) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file


def refusal(file: Path) -> str:
    with pytest.raises(GymError) as caught:
        load_rows(file)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert str(file) in caught.value.message
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_sample_of_json_and_a_picture_is_a_conversation_with_the_picture(
    tmp_path: Path, suffix: str
) -> None:
    row = {
        "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}],
        "id": 1,
    }
    members = [
        ("train/000.png", picture()),
        ("train/000.json", json.dumps(row).encode()),
        ("train/001.json", json.dumps({"conversations": row["conversations"][1:]}).encode()),
    ]
    first, second = load_rows(shard(tmp_path / f"a{suffix}", members))
    assert first["images"] == [{"bytes": picture()}]
    assert first["messages"][0] == {"role": "user", "content": "<image>what?"}
    assert first.unread == ("id",)
    assert str(first.place).endswith(": train/000")
    assert second == {"messages": [{"role": "assistant", "content": "red"}]}


def test_a_caption_is_the_answer_to_its_picture(tmp_path: Path) -> None:
    members = [
        ("a.jpg", picture(form="JPEG")),
        ("a.txt", b"a red square\n"),
        ("a.json", b'{"similarity": 0.3}'),
        ("a.cls", b"3"),
    ]
    (found,) = load_rows(shard(tmp_path / "a.tar", members))
    assert found["messages"] == [
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "a red square"},
    ]
    assert found.unread == (".cls", "similarity")


def test_pictures_are_in_the_order_in_which_the_row_names_them(tmp_path: Path) -> None:
    row: Raw = {
        "messages": [{"role": "user", "content": "<image><image>"}, SAY],
        "images": ["a.1.png", "a.0.png"],
    }
    members = [
        ("a.0.png", picture("red")),
        ("a.1.png", picture("blue")),
        ("a.json", json.dumps(row).encode()),
    ]
    (found,) = load_rows(shard(tmp_path / "a.tar", members))
    assert [image["bytes"] for image in found["images"]] == [picture("blue"), picture("red")]
    row = {"messages": [ASK, SAY], "images": ["a.1.png"]}
    members[2] = ("a.json", json.dumps(row).encode())
    (found,) = load_rows(shard(tmp_path / "c.tar", members))
    assert found["images"] == [{"bytes": picture("blue")}]
    assert found.unread == (".0.png",)
    row["images"] = ["../../etc/passwd"]
    members[2] = ("a.json", json.dumps(row).encode())
    assert "refers to the image passwd, which is missing" in refusal(shard(tmp_path / "b.tar", members))


def test_samples_are_those_of_the_datasets_package(tmp_path: Path) -> None:
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    members = [
        ("x/a.b.png", picture()),
        ("x/a.json", json.dumps({"messages": [ASK, SAY]}).encode()),
        ("x/b.jpg", picture("blue", "JPEG")),
        ("x/b.txt", b"blue"),
    ]
    file = shard(tmp_path / "a.tar", members)
    with tarfile.open(file) as archive:
        opened = [(member.name, archive.extractfile(member)) for member in archive]
        theirs = list(WebDataset._get_pipeline_from_tar(str(file), iter(opened)))
    ours = list(iter_rows(file))
    assert [place.rpartition(": ")[2] for place, _ in ours] == [sample["__key__"] for sample in theirs]
    assert [row["images"][0]["bytes"] for _, row in ours] == [theirs[0]["b.png"], theirs[1]["jpg"]]


def test_the_videos_of_a_sample_are_its_rows_media(tmp_path: Path) -> None:
    members = [("a.mp4", b"x"), ("a.json", json.dumps({"messages": [ASK, SAY]}).encode())]
    (row,) = load_rows(shard(tmp_path / "a.tar", members))
    assert [video["bytes"] for video in row["videos"]] == [b"x"]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("a.png", b"x"), ("a.png", b"y")], "is in the archive twice"),
        ([("noname", b"x")], "has no suffix"),
        ([("a.json", b"[1]")], "is not a JSON object"),
        ([("a.json", b"{")], "is not valid JSON"),
        ([("a.txt", b"\xff"), ("a.png", b"x")], "not UTF-8 at byte 0"),
        ([("a.npy", b"x")], "no known format has the columns '.npy'"),
        ([("a.json", b'{"messages": []}')], "not a list of turns"),
        ([("/etc/a.png", b""), ("/etc/a.txt", b"x")], "a.png is empty"),
        (
            [("a.json", b'{"text": "x"}'), ("b.json", b'{"text": "y"}'), ("a.png", b"x")],
            "a.png is not next to the other members of its sample",
        ),
        ([(f"a.s{number}", b"") for number in range(1025)], "a has more than 1024 members"),
    ],
)
def test_samples_that_are_no_rows_are_refused_by_name(
    members: list[tuple[str, bytes]], said: str, tmp_path: Path
) -> None:
    assert said in refusal(shard(tmp_path / "a.tar", members))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_members_that_are_no_files_are_refused(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("a.json")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "a.json is not a regular file" in refusal(tmp_path / "a.tar")


def test_a_hostile_name_writes_nothing_and_is_shown_without_control_characters(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    file = shard(folder / "a.tar", [("../../escaped\x1b[2J.txt", b"x"), ("../../escaped\x1b[2J.png", b"y")])
    (found,) = load_rows(file)
    assert "\x1b" not in str(found.place)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "inner"]


def test_samples_and_headers_beyond_the_limits_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_ROW_BYTES", 1000)
    file = shard(tmp_path / "a.tar", [("a.png", bytes(600)), ("a.txt", bytes(600))])
    assert "longer than" in refusal(file)
    info = tarfile.TarInfo("b.png")
    info.size = 10**12  # the archive has no such contents
    (tmp_path / "b.tar").write_bytes(info.tobuf())
    assert "b.png is longer than" in refusal(tmp_path / "b.tar")
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 10**12
    (tmp_path / "c.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert "a header of" in refusal(tmp_path / "c.tar")


def test_maps_of_sparse_files_and_global_headers_are_bounded(tmp_path: Path) -> None:
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.png"}
    info, sparse_map = tarfile.TarInfo("a.png"), b"600000\n" + b"1\n" * 1_200_000
    info.size, info.pax_headers = len(sparse_map), {**sparse, "GNU.sparse.realsize": "1"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(sparse_map))
    assert "a header of" in refusal(tmp_path / "a.tar")
    headers = {f"key{number}": "x" for number in range(65)}
    file = shard(tmp_path / "b.tar", [("a.txt", b"x")], format=tarfile.PAX_FORMAT, pax_headers=headers)
    assert "follows too many global headers" in refusal(file)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    file = shard(tmp_path / "a.tar", [("a.txt", bytes(5000)), ("a.png", b"x")])
    whole = file.read_bytes()
    file.write_bytes(whole[:2000])
    assert "a.txt is truncated" in refusal(file)
    file.write_bytes(b"no archive" * 200)
    assert "not a readable tar archive" in refusal(file)
    packed = tmp_path / "b.tar.gz"
    packed.write_bytes(gzip.compress(whole)[:100])
    assert "cannot be read" in refusal(packed)


def test_shards_are_found_in_a_folder_with_other_files(tmp_path: Path) -> None:
    shard(tmp_path / "00000.tar", [("a.json", json.dumps({"messages": [ASK, SAY]}).encode())])
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [ASK, SAY]}))
    assert len(load_rows(tmp_path)) == 2


def test_nested_columns_maps_and_bytes_of_parquet_are_read(tmp_path: Path) -> None:
    turn = pyarrow.map_(pyarrow.string(), pyarrow.string())
    turns = pyarrow.array([[list(each.items()) for each in (ASK, SAY)]], pyarrow.list_(turn))
    parquet.write_table(pyarrow.table({"messages": turns}), tmp_path / "a.parquet")
    assert load_rows(tmp_path / "a.parquet") == [{"messages": [ASK, SAY]}]
    nested = pyarrow.array([{"talk": [ASK, SAY], "score": 1}])
    image = pyarrow.array([b"\x89PNG"], pyarrow.binary())
    parquet.write_table(pyarrow.table({"data": nested, "image": image}), tmp_path / "b.parquet")
    (found,) = load_rows(tmp_path / "b.parquet", columns={"messages": "data.talk"})
    assert found == {"messages": [ASK, SAY], "images": [{"bytes": b"\x89PNG"}]}
    assert found.unread == ("data",)
    twice = pyarrow.array([[("k", "v"), ("k", "w")]], turn)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "meta": twice}), tmp_path / "c.parquet")
    assert "not a readable Parquet file" in refusal(tmp_path / "c.parquet")
