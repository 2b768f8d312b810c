"""Data sets that are streamed from a Hub: at the commit that was agreed to, and no answer longer than its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import pytest

from gym_fed.base.downloads import ensure_dataset
from gym_fed.base.downloads.streamed import COMMITS, agreed_commit
from gym_fed.cli.models.needed import ensure_datasets
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.hub import hub_rows
from tests.support.model_hub import ModelHub, Repo

ROWS = "acme/streamed"
FILE = "data/train.jsonl"


def lines(text: str, count: int = 3) -> bytes:
    return b"".join(json.dumps({"text": f"{text} {number}"}).encode() + b"\n" for number in range(count))


@pytest.fixture
def rows(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """A data set of three rows, read through the loopback Hub."""
    from huggingface_hub import HfFileSystem

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", tmp_path / "modules")
    HfFileSystem.clear_instance_cache()
    hub.repos[ROWS] = Repo(
        {"README.md": b"rows", FILE: lines("old")}, kind="dataset", card={"license": "mit"}
    )
    return hub.repos[ROWS]


def read() -> list[str]:
    return [row["text"] for _, row in hub_rows(ROWS)]


def move_on(hub: ModelHub, rows: Repo) -> Repo:
    """A new commit with other rows."""
    hub.repos[ROWS] = Repo(
        {**rows.files, FILE: lines("new")}, kind="dataset", card=rows.card, older={rows.commit: rows}
    )
    return hub.repos[ROWS]


def test_rows_are_those_of_the_commit_that_was_agreed_to(hub: ModelHub, rows: Repo) -> None:
    ensure_dataset(ROWS, consent=lambda offer: True)
    new = move_on(hub, rows)
    assert read() == ["old 0", "old 1", "old 2"]
    assert read() == ["old 0", "old 1", "old 2"]
    asked = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert asked
    assert all(f"/resolve/{rows.commit}/" in path for path in asked)
    os.environ[COMMITS] = "{}"
    ensure_dataset(ROWS, consent=lambda offer: offer.commit == new.commit)
    assert read() == ["new 0", "new 1", "new 2"]


def test_processes_of_a_run_read_the_commit_of_their_parent_and_do_not_ask_again(
    hub: ModelHub, rows: Repo
) -> None:
    ensure_dataset(ROWS, consent=lambda offer: True)
    assert rows.commit in os.environ[COMMITS]
    move_on(hub, rows)
    ensure_datasets([DataConfig(hub=ROWS)], yes=False)
    assert agreed_commit(ROWS) == rows.commit


def test_without_a_question_all_readings_of_a_process_are_of_one_commit(hub: ModelHub, rows: Repo) -> None:
    assert read() == ["old 0", "old 1", "old 2"]
    move_on(hub, rows)
    assert read() == ["old 0", "old 1", "old 2"]


def test_a_commit_that_the_hub_no_longer_has_is_named(hub: ModelHub, rows: Repo) -> None:
    ensure_dataset(ROWS, consent=lambda offer: True)
    hub.repos[ROWS] = Repo({**rows.files, FILE: lines("new")}, kind="dataset")
    with pytest.raises(GymError) as raised:
        read()
    assert raised.value.code is ErrorCode.STALE
    assert rows.commit[:12] in raised.value.message


@pytest.mark.parametrize("path", [FILE, "README.md"])
def test_an_answer_longer_than_its_file_is_cut_off(hub: ModelHub, rows: Repo, path: str) -> None:
    rows.sent[path] = b'{"text": "' + b"x" * (32 << 20) + b'"}\n'
    with pytest.raises(GymError) as raised:
        read()
    assert raised.value.code is ErrorCode.TOO_LARGE
    assert path in raised.value.message
    assert "HF_ENDPOINT" in raised.value.hint
