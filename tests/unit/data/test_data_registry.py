"""The dataset registry: versions with a licence, verified both ways; torn, damaged and concurrent pushes do no harm."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.data import DatasetRegistry, load_rows
from gym_fed.data.objects import Objects

LICENCE = "CC-BY-4.0"


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh store of each kind."""
    places = {
        "folder": str(tmp_path / "store"),
        "file": f"file://{tmp_path}/store",
        "memory": "memory://store",
    }
    yield places[request.param]
    memory = fsspec.filesystem("memory")
    if memory.exists("/store"):
        memory.rm("/store", recursive=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "deep" / "b.jsonl").write_text('{"text": "b"}\n' * 1000)
    (folder / ".hidden").write_text("stays here")
    return folder


def test_what_is_pushed_is_pulled_with_its_licence(url: str, data: Path, tmp_path: Path) -> None:
    registry = DatasetRegistry(url)
    pushed = registry.push("me/words", data, licence="cc-by-4.0", description="Two letters.")
    assert (pushed.version, pushed.licence) == (1, LICENCE)
    assert [file.path for file in pushed.files] == ["a.jsonl", "deep/b.jsonl"]
    pulled = DatasetRegistry(url).pull("me/words", tmp_path / "here")
    assert pulled == pushed
    assert len(load_rows(tmp_path / "here")) == 1001
    assert json.loads((tmp_path / "here/.gym-dataset.json").read_text())["licence"] == LICENCE
    assert [m.name for m in registry.list()] == ["me/words"]


def test_versions_count_up_and_old_ones_stay(url: str, data: Path, tmp_path: Path) -> None:
    registry = DatasetRegistry(url)
    registry.push("words", data, licence=LICENCE)
    assert registry.push("words", data, licence=LICENCE).version == 1, "nothing has changed"
    (data / "a.jsonl").write_text('{"text": "A"}\n')
    assert registry.push("words", data, licence=LICENCE).version == 2
    registry.pull("words@1", tmp_path / "old")
    registry.pull("words", tmp_path / "new")
    assert (tmp_path / "old/a.jsonl").read_text() == '{"text": "a"}\n'
    assert (tmp_path / "new/a.jsonl").read_text() == '{"text": "A"}\n'
    with pytest.raises(GymError, match="no dataset words@3") as caught:
        registry.show("words@3")
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert "1, 2" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "licence", "problem"),
    [
        ("words", None, "licence: missing"),
        ("words", " ", "licence: missing"),
        ("words", "CC-BY", "'CC-BY' is not a known SPDX identifier"),
        ("words", "MIT AND Mine", "'Mine' is not a known SPDX"),
        ("../words", "MIT", "not a valid dataset name"),
        ("Words", "MIT", "not a valid dataset name"),
        ("a/b/c", "MIT", "not a valid dataset name"),
    ],
)
def test_a_push_without_a_known_licence_or_a_clean_name_is_refused(
    tmp_path: Path, data: Path, name: str, licence: str | None, problem: str
) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        DatasetRegistry(tmp_path / "store").push(name, data, licence=licence)
    assert caught.value.code is ErrorCode.USAGE
    assert not (tmp_path / "store").exists(), "refused before anything is written"


def test_own_and_joined_licences_are_taken(tmp_path: Path, data: Path) -> None:
    registry = DatasetRegistry(tmp_path / "store")
    assert registry.push("a", data, licence="LicenseRef-ask-me").licence == "LicenseRef-ask-me"
    assert registry.push("b", data, licence="mit OR cc0-1.0").licence == "MIT OR CC0-1.0"


def test_a_pull_never_overwrites_and_fetches_nothing_when_it_would(
    url: str, data: Path, tmp_path: Path
) -> None:
    registry = DatasetRegistry(url)
    registry.push("words", data, licence=LICENCE)
    here = tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    (here / "deep/b.jsonl").write_text("mine")
    with pytest.raises(GymError) as caught:
        registry.pull("words", here)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert (here / "deep/b.jsonl").read_text() == "mine"
    assert not (here / "a.jsonl").exists()


def test_a_stopped_pull_continues_where_it_was(url: str, data: Path, tmp_path: Path) -> None:
    registry = DatasetRegistry(url)
    pushed = registry.push("words", data, licence=LICENCE)
    big = pushed.files[1]
    content = (data / big.path).read_bytes()
    here = tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    # What is there already is not read again: a part of other bytes would be noticed by the hash.
    (here / "deep" / f".b.jsonl.{big.sha256[:16]}.part").write_bytes(content[:5000])
    registry.pull("words", here)
    assert (here / "deep/b.jsonl").read_bytes() == content
    assert not list(here.rglob("*.part"))


def test_a_damaged_object_and_a_damaged_part_are_refused_by_their_hash(
    url: str, data: Path, tmp_path: Path
) -> None:
    registry = DatasetRegistry(url)
    big = registry.push("words", data, licence=LICENCE).files[1]
    here = tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    part = here / "deep" / f".b.jsonl.{big.sha256[:16]}.part"
    part.write_bytes(b"wrong beginning")
    with pytest.raises(GymError) as caught:
        registry.pull("words", here)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not part.exists()
    registry.pull("words", here)  # the next try begins again

    fs, root = fsspec.core.url_to_fs(url)
    path = f"{root}/objects/{big.sha256[:2]}/{big.sha256}"
    fs.pipe_file(path, b"x" + fs.cat_file(path)[1:])
    with pytest.raises(GymError, match=big.sha256) as caught:
        registry.pull("words", tmp_path / "there")
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not (tmp_path / "there/deep/b.jsonl").exists()


def test_a_push_that_stops_before_its_manifest_has_published_nothing(
    url: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = DatasetRegistry(url)

    def stopped(*arguments: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "create", stopped)
        with pytest.raises(KeyboardInterrupt):
            registry.push("words", data, licence=LICENCE)
    assert registry.list() == []
    assert registry.push("words", data, licence=LICENCE).version == 1


def test_pushes_at_the_same_time_get_versions_of_their_own(url: str, tmp_path: Path) -> None:
    files = []
    for index in range(8):
        files.append(tmp_path / f"{index}.jsonl")
        files[-1].write_text(json.dumps({"text": str(index)}) + "\n")
    barrier = threading.Barrier(len(files))

    def push(file: Path) -> None:
        barrier.wait()
        DatasetRegistry(url).push("words", file, licence=LICENCE)

    threads = [threading.Thread(target=push, args=(file,)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    registry = DatasetRegistry(url)
    assert registry.versions("words") == list(range(1, 9))
    pushed = {registry.show(f"words@{version}").files[0].path for version in range(1, 9)}
    assert pushed == {file.name for file in files}


@pytest.mark.parametrize(
    "paths",
    [
        *(["../out.jsonl"], ["/etc/out.jsonl"], ["a/../../b"], ["C:/x"], ["a\\b"], [""]),
        *(["a", "a"], ["a", "A"], ["a", "a/b"], [".gym-dataset.json"], [".GYM-dataset.json"]),
    ],
    ids=str,
)
def test_a_manifest_whose_files_lead_out_of_the_folder_or_collide_is_refused_before_a_byte(
    tmp_path: Path, data: Path, paths: list[str]
) -> None:
    registry = DatasetRegistry(tmp_path / "store")
    registry.push("words", data, licence=LICENCE)
    manifest = tmp_path / "store/datasets/words/000001.json"
    values = json.loads(manifest.read_text())
    values["files"] = [{**values["files"][0], "path": path} for path in paths]
    manifest.write_text(json.dumps(values))
    with pytest.raises(GymError) as caught:
        registry.pull("words", tmp_path / "here")
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert not (tmp_path / "here").exists()


def test_a_torn_manifest_is_named(tmp_path: Path, data: Path) -> None:
    registry = DatasetRegistry(tmp_path / "store")
    registry.push("words", data, licence=LICENCE)
    manifest = tmp_path / "store/datasets/words/000001.json"
    manifest.write_bytes(manifest.read_bytes()[:40])
    with pytest.raises(GymError, match=r"000001.json") as caught:
        registry.list()
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_equal_files_are_stored_once(tmp_path: Path, data: Path) -> None:
    registry = DatasetRegistry(tmp_path / "store")
    registry.push("a", data, licence=LICENCE)
    registry.push("b", data, licence=LICENCE)
    objects = [file for file in (tmp_path / "store/objects").rglob("*") if file.is_file()]
    assert len(objects) == 2
    assert {file.name for file in objects} == {file_sha256(file) for file in objects}


def test_files_that_differ_in_case_alone_are_not_pushed(tmp_path: Path, data: Path) -> None:
    (data / "A.jsonl").write_text("{}\n")
    if (data / "a.jsonl").read_text() == "{}\n":
        pytest.skip("this file system ignores case")
    with pytest.raises(GymError, match="but for its case") as caught:
        DatasetRegistry(tmp_path / "store").push("words", data, licence=LICENCE)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_an_implausible_size_and_a_name_that_nobody_can_push_spoil_no_list(
    tmp_path: Path, data: Path
) -> None:
    registry = DatasetRegistry(tmp_path / "store")
    registry.push("words", data, licence=LICENCE)
    (tmp_path / "store/datasets/Bad Name").mkdir()
    (tmp_path / "store/datasets/Bad Name/000001.json").write_text("{}")
    assert [manifest.name for manifest in registry.list()] == ["words"]
    manifest = tmp_path / "store/datasets/words/000001.json"
    values = json.loads(manifest.read_text())
    values["files"][0]["num_bytes"] = 10**400
    manifest.write_text(json.dumps(values))
    with pytest.raises(GymError, match="num_bytes"):
        registry.list()


def test_an_object_that_would_fill_the_disk_is_refused_before_a_byte(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = DatasetRegistry(tmp_path / "store")
    registry.push("words", data / "a.jsonl", licence=LICENCE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(GymError) as caught:
        registry.pull("words", tmp_path / "here")
    assert caught.value.code is ErrorCode.DISK_FULL
    assert not list((tmp_path / "here").iterdir())
