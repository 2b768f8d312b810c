"""A board in a registry: everybody's lines, records that can be fetched, and nothing that changes unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.objects import Objects
from gym_fed.evaluation.leaderboard import published
from gym_fed.evaluation.leaderboard.board import Leaderboard
from gym_fed.evaluation.leaderboard.published import PublishedLeaderboard
from gym_fed.evaluation.leaderboard.submissions import submit, verify
from tests.unit.evaluation.test_leaderboard import ANOTHER, MINE, RUN, rerun_with


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """The folder of a registry with one submission of ``MINE``."""
    url = str(tmp_path / "registry")
    posted(tmp_path / "mine.jsonl", url)
    return url


def posted(board: Path, registry: str, name: str = "mine") -> None:
    submit(RUN, model_name=name, organization="me", board=board, registry=registry, key=MINE)


def refusal(board: Path, registry: str) -> GymError:
    with pytest.raises(GymError) as error:
        PublishedLeaderboard(board, registry)
    return error.value


def test_a_stranger_fetches_the_board_with_a_record_and_reproduces_a_line(
    registry: str, tmp_path: Path
) -> None:
    board = PublishedLeaderboard(tmp_path / "theirs.jsonl", registry)
    verify(board, board.named("1"), rerun_with(lambda sample: sample), ANOTHER)
    again = PublishedLeaderboard(tmp_path / "mine.jsonl", registry)
    assert again.named("1").status == "reproduced by 1"
    assert again.head == Leaderboard(tmp_path / "theirs.jsonl").head


def test_two_that_submit_at_once_get_two_lines(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Objects.create

    def create_after_another(self: Objects, path: str, data: bytes) -> bool:
        monkeypatch.setattr(Objects, "create", create)
        posted(tmp_path / "faster.jsonl", registry, "faster")
        return create(self, path, data)

    board = PublishedLeaderboard(tmp_path / "slower.jsonl", registry)
    assert len(board.board_rows) == 1
    monkeypatch.setattr(Objects, "create", create_after_another)
    posted(tmp_path / "slower.jsonl", registry, "slower")
    rows = PublishedLeaderboard(tmp_path / "new.jsonl", registry).board_rows.values()
    assert [row.submission.model_name for row in rows] == ["mine", "faster", "slower"]


def test_a_registry_that_lost_or_changed_a_line_is_refused_and_the_copy_stays(
    registry: str, tmp_path: Path
) -> None:
    copy = tmp_path / "mine.jsonl"
    before = copy.read_bytes()
    line = Path(registry, "leaderboard/000001.json")
    another = str(tmp_path / "another")
    posted(tmp_path / "x.jsonl", another, "other")
    line.write_bytes(Path(another, "leaderboard/000001.json").read_bytes())
    assert "it is a different board" in refusal(copy, registry).message
    line.unlink()
    error = refusal(copy, registry)
    assert error.code is ErrorCode.STATE_CORRUPT
    assert "has 0 lines" in error.message
    assert copy.read_bytes() == before


def test_a_forged_line_is_refused_before_the_copy_is_extended(registry: str, tmp_path: Path) -> None:
    line = Path(registry, "leaderboard/000001.json")
    document = json.loads(line.read_text())
    document["body"]["content"]["model_name"] = "better"
    line.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")
    assert refusal(tmp_path / "new.jsonl", registry).code is ErrorCode.STATE_CORRUPT
    assert not (tmp_path / "new.jsonl").exists()


def test_a_record_that_the_registry_lacks_is_named(registry: str, tmp_path: Path) -> None:
    (samples,) = Path(registry).rglob("samples.jsonl")
    samples.unlink()
    board = PublishedLeaderboard(tmp_path / "theirs.jsonl", registry)
    with pytest.raises(GymError, match=r"line 1 has no samples\.jsonl"):
        verify(board, board.named("1"), rerun_with(lambda sample: sample), ANOTHER)


def test_a_folder_in_the_place_of_a_line_ends_a_submission_by_name(registry: str, tmp_path: Path) -> None:
    Path(registry, "leaderboard/000002.json").mkdir()
    with pytest.raises(GymError, match="line 2 is not a file"):
        posted(tmp_path / "mine.jsonl", registry, "again")


def test_more_lines_than_a_board_may_have_are_refused_before_the_copy_is_extended(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "MAX_BYTES", 100)
    copy = tmp_path / "new.jsonl"
    assert refusal(copy, registry).code is ErrorCode.TOO_LARGE
    assert not copy.exists() or not copy.read_bytes()


def test_other_samples_than_were_submitted_are_not_written(registry: str, tmp_path: Path) -> None:
    (samples,) = Path(registry).glob("leaderboard/records/*/samples.jsonl")
    samples.write_bytes(samples.read_bytes() + b"{}\n")
    board = PublishedLeaderboard(tmp_path / "theirs" / "board.jsonl", registry)
    with pytest.raises(GymError, match="but the submission has") as error:
        board.fetch_record(board.named("1"))
    assert error.value.code is ErrorCode.HASH_MISMATCH
    assert not list((tmp_path / "theirs").rglob("*_samples.jsonl"))
