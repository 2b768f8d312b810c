"""The record and licences of an exported file: always together, and never replacing another file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.export.formats.base import Options
from gym_fed.export.formats.delta import Delta
from gym_fed.export.formats.gguf import Gguf
from gym_fed.export.formats.huggingface import HuggingFace
from gym_fed.export.run import companion_files, export, require_new
from gym_fed.export.source import Source, open_source
from tests.support.adapters import sibling


@pytest.fixture
def source(tmp_path: Path) -> Source:
    base = sibling("Llama", tmp_path / "base")
    (base / "LICENSE").write_text("mit")
    return open_source(str(base))


@pytest.mark.parametrize("name", ["export.json", "card.md", "LICENSE", "NOTICE.txt"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_somebody_else_has_beside_the_name_is_refused_before_anything_is_loaded(
    tmp_path: Path, name: str, is_link: bool
) -> None:
    own, there = tmp_path / "own.txt", tmp_path / f"model.gguf.{name}"
    own.write_text("mine")
    there.symlink_to(own) if is_link else there.write_text("mine")
    with pytest.raises(GymError, match=name) as raised:
        export(Source("not loaded", None, None, None), "gguf", tmp_path / "model.gguf", Options())
    assert raised.value.code is ErrorCode.FILE_EXISTS
    assert there.read_text() == own.read_text() == "mine"
    require_new(tmp_path / "model.gguf", HuggingFace())  # a folder has nothing beside it
    if name not in ("export.json", "card.md"):
        require_new(tmp_path / "model.gguf", Delta())  # no weights of the base, and so no licence of it


def test_record_and_licence_are_there_before_the_file_and_go_where_it_does_not_come(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "out/model.pt", []

    def interrupted(part: Path, _: Path) -> None:
        record = json.loads((tmp_path / "out/model.pt.export.json").read_text())
        assert record["files"][path.name] == file_sha256(part)
        assert (tmp_path / "out/model.pt.LICENSE").read_text() == "mit"
        seen.append(part)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(source, "torchscript", path, Options(), check=False)
    assert len(seen) == 1
    assert list(path.parent.iterdir()) == []


def test_what_a_killed_export_left_without_its_file_is_replaced_unless_it_was_changed(
    source: Source, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    record = export(source, "torchscript", path, Options(), check=False)
    names = {"model.pt", "model.pt.LICENSE", "model.pt.card.md"}
    assert record["files"] == {name: file_sha256(tmp_path / name) for name in names}
    path.unlink()
    again = export(source, "torchscript", path, Options(), check=False)
    assert json.loads((tmp_path / "model.pt.export.json").read_text()) == again
    path.unlink()
    (tmp_path / "model.pt.LICENSE").write_text("of another model")
    with pytest.raises(GymError, match=r"model\.pt\.LICENSE already exists"):
        require_new(path, Gguf())


def test_of_two_exports_to_one_name_the_later_one_leaves_the_record_of_the_first(tmp_path: Path) -> None:
    path, record = tmp_path / "model.gguf", tmp_path / "model.gguf.export.json"
    with companion_files(path, {record.name: b"first"}, "", licences=True):
        path.write_text("first")
    again: Any = companion_files(path, {record.name: b"second"}, "", licences=True)
    with pytest.raises(GymError, match="another process wrote it"), again:
        pytest.fail("nothing is written")
    assert record.read_text() == path.read_text() == "first"
