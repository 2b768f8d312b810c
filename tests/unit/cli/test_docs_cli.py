"""`gym docs`: the guides of this installation, as addresses of files and as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.cli import docs
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError

ROOT = Path(__file__).resolve().parents[3]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["docs", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_page_of_the_site_is_named_by_the_address_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.html").write_text("<h1>Train</h1>")
    monkeypatch.setattr(docs, "_SITES", (tmp_path / "none", tmp_path))
    assert run("train").split() == [(tmp_path / "train.html").as_uri()]
    assert run("docs/train.md").split() == [(tmp_path / "train.html").as_uri()]


def test_without_a_site_the_address_is_that_of_the_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "_SITES", (tmp_path,))
    shown = json.loads(run("decisions/README", "--json"))
    file = ROOT / "docs" / "decisions" / "README.md"
    assert shown == {"page": "decisions/README", "url": file.as_uri(), "file": str(file)}


def test_a_page_that_is_piped_is_its_markdown() -> None:
    assert run("train", "--print") == (ROOT / "docs" / "train.md").read_text()


def test_a_reference_page_is_built_and_printed_where_there_is_no_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "_SITES", (tmp_path,))
    assert run("docs/config.md").startswith("# Every key of every file\n")
    assert json.loads(run("config", "--json")) == {"page": "config", "url": None, "file": None}
    (tmp_path / "config.html").write_text("<h1>Keys</h1>")
    assert run("config").split() == [(tmp_path / "config.html").as_uri()]


def test_a_page_in_a_terminal_has_no_marks_of_markdown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs.out, "_force_terminal", True)
    docs._print("# Title\n\nSome **strong** words.\n")
    shown = capsys.readouterr().out
    assert "strong" in shown
    assert "**" not in shown
    assert "# Title" not in shown


def test_a_name_that_is_nearly_a_page_is_answered_with_the_page() -> None:
    with pytest.raises(GymError) as refused:
        CliRunner().invoke(app, ["docs", "trian"], catch_exceptions=False)
    assert refused.value.code is ErrorCode.FILE_NOT_FOUND
    assert "train" in refused.value.hint


def test_an_installation_without_guides_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "_PAGES", (tmp_path / "none",))
    with pytest.raises(GymError, match="no guides"):
        CliRunner().invoke(app, ["docs"], catch_exceptions=False)


def test_a_page_that_resembles_none_is_refused_in_two_lines() -> None:
    refused = CliRunner().invoke(app, ["docs", "nosuch"])
    assert isinstance(refused.exception, GymError)
    assert refused.exception.hint == "gym docs --print lists all pages"
    near = CliRunner().invoke(app, ["docs", "trian"])
    assert isinstance(near.exception, GymError)
    assert near.exception.hint.startswith("did you mean train")
