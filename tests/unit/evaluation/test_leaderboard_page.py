"""The page of a board: complete in one file, and nothing that a submitter wrote runs in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gym_fed.evaluation.leaderboard.board import Leaderboard
from gym_fed.evaluation.leaderboard.lines import BoardFigure, BoardTask, Submission
from gym_fed.evaluation.leaderboard.page import board_page
from gym_fed.trust.identity.keys import SigningKey

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</table></body><iframe src=//evil.example>",
    "javascript:alert(1)",
    "&lt;b&gt; &#60;",
]


class Seen(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def submission(name: str, *tasks: str) -> Submission:
    found = [
        BoardTask(
            task=task,
            version=name,
            num_fewshot=0,
            lock=name,
            num_samples=20,
            main_metric=name,
            figures={name: BoardFigure(value=0.5, stderr=0.1)},
        )
        for task in tasks
    ]
    return Submission(
        model_name=name,
        organization=name,
        record="0" * 36,
        identity={"model": name, "delta": name},
        results="0" * 64,
        tasks=found,
        at=2**53 - 1,
    )


def page_of(name: str, tmp_path: Path) -> str:
    board = Leaderboard(tmp_path / "leaderboard.jsonl")
    board.add(submission(name, name), SigningKey.generate())
    return board_page(board, name)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_submitter_wrote_is_shown_as_text(name: str, tmp_path: Path) -> None:
    seen, plain = Seen(), Seen()
    seen.feed(page_of(name, tmp_path / "a"))
    plain.feed(page_of("harmless", tmp_path / "b"))
    assert seen.tags == plain.tags
    assert [key for key, _ in seen.attributes] == [key for key, _ in plain.attributes]
    assert seen.texts.count(name) >= 4


def test_the_page_loads_nothing_and_knows_light_and_dark(tmp_path: Path) -> None:
    written = page_of("mine", tmp_path)
    assert re.findall(r"\bsrc=|href|@import|url\(|fetch\(|XMLHttp", written) == []
    assert "default-src 'none'" in written
    assert "color-scheme:light dark" in written


def test_the_page_has_every_figure_with_its_error_and_the_boards_head(tmp_path: Path) -> None:
    written = page_of("mine", tmp_path)
    assert 'data-value="0.5">0.5000' in written
    assert "&plusmn; 0.1000, n=20" in written
    assert "self-reported" in written
    assert Leaderboard(tmp_path / "leaderboard.jsonl").head in written


def test_a_board_of_many_tasks_shows_those_of_most_submissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.evaluation.leaderboard.page.MAX_TASKS", 2)
    board = Leaderboard(tmp_path / "leaderboard.jsonl")
    for name, tasks in (("a", "xyz"), ("b", "wz")):
        board.add(submission("m" + name, *tasks), SigningKey.generate())
    written = board_page(board)
    assert re.findall(r"<button>(\w)</button>", written) == ["x", "z"]
    assert "2 submissions; left out: 2 more tasks; head" in written


def test_many_submissions_of_one_key_do_not_push_the_tasks_of_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.evaluation.leaderboard.page.MAX_TASKS", 1)
    board = Leaderboard(tmp_path / "leaderboard.jsonl")
    for _ in range(2):
        board.add(submission("mine", "x"), SigningKey.generate())
    flooder = SigningKey.generate()
    for number in range(3):
        said = submission("flood", "w").model_dump(mode="json")
        board.add(Submission.model_validate({**said, "record": f"{number}" * 36}), flooder)
    assert re.findall(r"<button>(\w)</button>", board_page(board)) == ["x"]


def test_a_board_without_lines_has_a_page(tmp_path: Path) -> None:
    assert "0 submissions; head <code>none</code>" in board_page(Leaderboard(tmp_path / "none.jsonl"))
