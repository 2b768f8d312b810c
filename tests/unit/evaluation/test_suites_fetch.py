"""`gym eval fetch` against a Hub on loopback: consent, verification, resume, the lock, and no network."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites.fetch import datasets_of, fetch_offers, offers_for
from gym_fed.evaluation.suites.store import LOCK, read_lock
from gym_fed.evaluation.suites.tasks import tasks_of
from tests.support.model_hub import ModelHub, Repo

pytest.importorskip("lm_eval")
NAME = "Rowan/hellaswag"
FILE = "data/validation-00000-of-00001.parquet"


def _table(count: int = 60) -> bytes:
    rows = [
        {
            "activity_label": "Cooking",
            "ctx_a": f"Person {number} cuts.",
            "ctx_b": "he",
            "endings": ["eats.", f"flies {'far ' * 40}{number}."],
            "label": str(number % 2),
        }
        for number in range(count)
    ]
    stream = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), stream, compression="none")
    return stream.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """Serves HellaSwag's repository, in which a script lies that nobody may run."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    files = {
        FILE: _table(),
        "data/train-00000-of-00001.parquet": b"x" * 9000,
        "hellaswag.py": b"raise SystemExit",
    }
    with ModelHub({NAME: Repo(files, kind="dataset", card={"license": "mit"})}) as served:
        served.stand_in(monkeypatch, tmp_path / "cache")
        yield served


def _fetch(home: Path, **more: Any) -> list[Path]:
    return fetch_offers(offers_for(["hellaswag"], home, **more), home)


def test_a_fetched_set_is_evaluated_and_costs_no_second_request(hub: ModelHub, tmp_path: Path) -> None:
    home = tmp_path / "evals"
    assert _fetch(home) == [home / "data" / "hellaswag" / "all" / "validation.jsonl"]
    assert {url.rpartition("/")[2] for _, url, _ in hub.requests if "/resolve/" in url} == {Path(FILE).name}
    hub.requests.clear()
    assert _fetch(home) == []
    task = tasks_of(["hellaswag"], home=home)[0]
    assert hub.requests == []
    assert task.num_rows == 60
    assert hub.repos[NAME].commit[:12] in task.source
    assert not (tmp_path / "cache").exists()  # a part of a repository is no copy of it for other programs


def test_the_lock_names_commit_licence_sources_and_sha256(hub: ModelHub, tmp_path: Path) -> None:
    _fetch(tmp_path)
    locked = json.loads((tmp_path / LOCK).read_text())["datasets"]["hellaswag"]
    assert locked["commit"] == hub.repos[NAME].commit
    assert (locked["licence"], locked["endpoint"]) == ("mit", hub.url)
    file = locked["files"]["hellaswag/all/validation.jsonl"]
    assert file["rows"] == 60
    assert list(file["sources"]) == [FILE]


def test_a_file_that_changed_since_is_refused_with_the_remedy(hub: ModelHub, tmp_path: Path) -> None:
    (file,) = _fetch(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"cuts", b"cuds", 1))
    with pytest.raises(GymError, match="sha256 differs") as caught:
        tasks_of(["hellaswag"], home=tmp_path)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert "gym eval fetch hellaswag" in caught.value.hint


def test_bytes_of_another_sha256_are_refused_and_nothing_is_written(hub: ModelHub, tmp_path: Path) -> None:
    true = hub.repos[NAME].files[FILE]
    hub.repos[NAME].sent[FILE] = true[:-10] + bytes(10)
    with pytest.raises(GymError, match="a different checksum") as caught:
        _fetch(tmp_path)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not (tmp_path / "data").exists()
    assert read_lock(tmp_path).datasets == {}


def test_a_truncated_file_is_refused(hub: ModelHub, tmp_path: Path) -> None:
    hub.repos[NAME].sent[FILE] = hub.repos[NAME].files[FILE][:-100]
    with pytest.raises(GymError, match="bytes instead of") as caught:
        _fetch(tmp_path)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not (tmp_path / "data").exists()


def test_a_lost_connection_goes_on_where_it_stopped(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.base.downloads.fetch.RETRY_SECONDS", 0.01)
    hub.repos[NAME].cut[FILE] = [5000]
    (file,) = _fetch(tmp_path)
    assert hub.gets(FILE) == [None, "bytes=5000-"]
    assert file.read_bytes().count(b"\n") == 60


def test_the_locked_commit_is_kept_until_an_update_is_asked_for(hub: ModelHub, tmp_path: Path) -> None:
    (file,) = _fetch(tmp_path)
    old, before = hub.repos[NAME], file.read_bytes()
    newer = {**old.files, FILE: _table(61)}
    hub.repos[NAME] = Repo(newer, kind="dataset", older={old.commit: old})
    file.unlink()
    _fetch(tmp_path)
    assert file.read_bytes() == before
    _fetch(tmp_path, update=True)
    assert file.read_bytes().count(b"\n") == 61
    assert read_lock(tmp_path).datasets["hellaswag"].commit == hub.repos[NAME].commit


def test_a_commit_whose_checksum_changed_is_refused(hub: ModelHub, tmp_path: Path) -> None:
    (file,) = _fetch(tmp_path)
    old = hub.repos[NAME]
    file.unlink()
    forged = Repo({**old.files, FILE: _table(59)}, kind="dataset", extra={"sha": old.commit})
    hub.repos[NAME] = Repo(old.files, kind="dataset", older={old.commit: forged})
    with pytest.raises(GymError, match=r"has a different sha256 than evals\.lock"):
        _fetch(tmp_path)


def test_a_repository_without_the_split_is_refused(hub: ModelHub, tmp_path: Path) -> None:
    del hub.repos[NAME].files[FILE]
    with pytest.raises(GymError, match=r"has no files that match data/validation-\*\.parquet"):
        _fetch(tmp_path)


def test_offline_is_refused_with_what_to_do_elsewhere(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GymError) as caught:
        _fetch(tmp_path)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "gym eval fetch hellaswag" in caught.value.hint
    assert hub.requests == []


def test_the_command_shows_bytes_and_licence_and_needs_consent(hub: ModelHub, tmp_path: Path) -> None:
    words = ["eval", "fetch", "hellaswag", "--sets", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, GymError)
    assert "would be fetched" in done.exception.message
    assert "licence: mit" in done.output
    assert not (tmp_path / LOCK).exists()
    done = CliRunner().invoke(app, [*words, "--yes"], catch_exceptions=False)
    assert f"1 file in {tmp_path}" in done.output


def test_a_suite_wants_every_subset_of_its_sets_once() -> None:
    wanted = datasets_of(["core", "arc", "flores"])
    assert {one.subset for one in wanted["arc"]} == {"ARC-Easy", "ARC-Challenge"}
    assert len({one.subset for one in wanted["mmlu"]}) == 57
    assert {one.subset for one in wanted["flores"]} == {
        "eng_Latn",
        "deu_Latn",
        "fra_Latn",
        "spa_Latn",
        "swh_Latn",
        "hin_Deva",
    }
    assert "tiny" not in wanted
    with pytest.raises(GymError, match="'cor'"):
        datasets_of(["cor"])


def test_sentences_of_two_languages_are_joined_by_their_id(tmp_path: Path) -> None:
    for language, texts in (("eng_Latn", ["a house", "a tree"]), ("deu_Latn", ["ein Haus", "ein Baum"])):
        folder = tmp_path / "flores" / language
        folder.mkdir(parents=True)
        rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
        ordered = rows if language == "eng_Latn" else rows[::-1]
        (folder / "devtest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))
    task = tasks_of(["flores_eng_Latn-deu_Latn"], tmp_path, home=tmp_path)[0]
    assert [row["to_text"] for row in task.rows["devtest"]] == ["ein Haus", "ein Baum"]
    assert task.kind == "translation"
