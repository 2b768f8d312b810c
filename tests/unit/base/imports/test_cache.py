"""The cache of imported models: said once, whole or absent, one process at a time, and never an older content."""

from __future__ import annotations

import json
import threading
import time
from collections import namedtuple
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.imports.folder import imported, imported_models, source_digest
from gym_fed.base.imports.importer import Importer, Report
from gym_fed.core.console import TextConsole
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.progress import progress_bar


class Letters(Importer):
    """A format of one text; what it becomes is that text."""

    name, version = "letters", 1

    def __init__(self) -> None:
        self.written = 0
        self.while_writing: Any = lambda: None

    def takes(self, source: Path) -> bool:
        return source.suffix == ".txt"

    def files(self, source: Path) -> list[Path]:
        return [source]

    def require_header(self, source: Path) -> None:
        if source.read_text().startswith("#"):
            raise GymError(ErrorCode.MODEL_INVALID, f"{source}: begins as no letters")

    def bytes_needed(self, source: Path) -> int:
        return source.stat().st_size

    def describe(self, source: Path) -> str:
        return "letters"

    def write(self, source: Path, folder: Path, report: Report) -> None:
        self.written += 1
        (folder / "config.json").write_text(json.dumps({"text": source.read_text()}))
        self.while_writing()


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Letters:
    importer = Letters()
    monkeypatch.setattr("gym_fed.base.imports.folder.IMPORTERS", (importer,))
    return importer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("one")
    return tmp_path / "a.txt"


def text(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["text"])


def test_a_source_is_read_and_named_once(
    letters: Letters, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = imported(source), imported(source)
    assert (first, letters.written) == (second, 1)
    said = capsys.readouterr()
    assert (said.out, said.err.count("importing")) == ("", 1)
    assert f"{source} (letters): 3 B in {first}" in said.err.replace("\n", " ")
    (one,) = imported_models()
    assert (one.source, one.format, one.folder) == (str(source), "letters", first)


def test_a_changed_source_is_another_folder(letters: Letters, source: Path) -> None:
    first = imported(source)
    source.write_text("two")
    assert (text(imported(source)), text(first)) == ("two", "one")


def test_the_digest_of_a_file_is_remembered_until_it_changes(
    letters: Letters, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.core.files import file_sha256

    hashed: list[Path] = []
    monkeypatch.setattr("gym_fed.base.imports.folder._SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(
        "gym_fed.base.imports.folder.file_sha256", lambda file: hashed.append(file) or file_sha256(file)
    )
    first = imported(source)
    assert imported(source) == first
    assert len(hashed) == 1
    source.write_text("two")
    assert imported(source) != first
    assert len(hashed) == 2


def test_names_and_digests_of_several_files_are_not_mistaken_for_others(tmp_path: Path) -> None:
    def digest(*names: str) -> str:
        files = [tmp_path / name for name in names]
        for file in files:
            file.write_text("one")
        return source_digest(files, tmp_path)

    assert digest("a", "b", "c") != digest(f"a {digest('a')}\nb", "c")


def test_a_source_of_another_kind_is_refused_before_it_is_hashed(
    letters: Letters, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.base.imports.folder.file_sha256", lambda _: pytest.fail("it was hashed"))
    source.write_text("# one")
    with pytest.raises(GymError, match="begins as no letters"):
        imported(source)


def test_hashing_is_said_of_large_files_once(
    letters: Letters, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gym_fed.base.imports.folder._SETTLED_SECONDS", -1.0)
    imported(source)
    assert f"hashing {source}" not in capsys.readouterr().err
    source.write_text("four")
    monkeypatch.setattr("gym_fed.base.imports.folder._HASHED_SILENTLY_BYTES", 3)
    imported(source)
    imported(source)
    said = capsys.readouterr()
    assert (said.out, said.err.count("hashing /")) == ("", 1)
    assert f"hashing {source}: 4 B" in said.err.replace("\n", " ")


def test_a_file_that_has_just_changed_is_hashed_again(letters: Letters, source: Path, home: Path) -> None:
    imported(source)
    assert not (home / "imports" / ".digests").exists()


def test_a_disk_that_will_not_do_is_refused_with_both_numbers_before_anything_is_written(
    letters: Letters, source: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 9, 2_000_000))
    with pytest.raises(
        GymError, match=r"the imported model needs 3 B, but .* has room for 2\.0 MB"
    ) as caught:
        imported(source)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert letters.written == 0


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_nothing_is_left_of_an_import_that_ends_early(
    letters: Letters, source: Path, home: Path, failure: type[BaseException]
) -> None:
    def fail() -> None:
        raise failure

    letters.while_writing = fail
    with pytest.raises(failure):
        imported(source)
    assert [file.name for file in (home / "imports").iterdir()] == [".locks"]
    letters.while_writing = lambda: None
    assert text(imported(source)) == "one"


def test_those_who_come_meanwhile_wait_for_the_one_who_reads(letters: Letters, source: Path) -> None:
    letters.while_writing = lambda: time.sleep(0.2)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(imported(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (letters.written, len(found), len(set(found))) == (1, 4, 1)


def test_a_source_that_changes_while_it_is_read_is_refused(
    letters: Letters, source: Path, home: Path
) -> None:
    letters.while_writing = lambda: source.write_text("later")
    with pytest.raises(GymError, match="changed while it was being read"):
        imported(source)
    assert imported_models() == []


@pytest.mark.parametrize("damage", ["missing", "cut", "older reader"])
def test_a_folder_that_is_not_what_this_reader_made_is_made_again(
    letters: Letters, source: Path, damage: str
) -> None:
    folder = imported(source)
    if damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "cut":
        (folder / "config.json").write_text("{")
    else:
        letters.version = 2  # type: ignore[misc]
    assert imported(source) == folder
    assert (text(folder), letters.written) == ("one", 2)


def test_a_name_with_marks_of_a_terminal_breaks_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = TextConsole()
    shown._force_terminal, shown.file = True, StringIO()
    monkeypatch.setattr("gym_fed.core.progress.err", shown)
    with progress_bar("[/]\x1b[2Jx.gguf", unit="bytes") as report:
        report(1, 2)
    assert "\x1b[2J" not in shown.file.getvalue()
