"""Words of messages: a suggestion stands once, and a noun behind a number agrees with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gym_fed.core.text import counted


@pytest.mark.parametrize(
    ("module", "words", "suggestion"),
    [
        ("gym_fed.cli.entry", ["exprot"], "did you mean 'export'?"),
        ("gym_fed.cli.entry", ["trian"], "did you mean 'train' or 'variant'?"),
        ("gym_fed.cli.entry", ["eval", "gym-nano", "--suit", "tiny"], "did you mean '--suite' or '--limit'?"),
        ("gym_fed.cli.entry", ["train", "--lerning-rate", "1"], "did you mean 'learning_rate'?"),
        ("gym_fed.cli.entry", ["train", "bad.yaml"], "did you mean 'learning_rate'?"),
        ("gym_server.cli.entry", ["statsu"], "did you mean 'status'?"),
        ("gym_client.cli.entry", ["statsu"], "did you mean 'status'?"),
    ],
)
def test_a_suggestion_for_a_mistyped_word_stands_once(
    module: str, words: list[str], suggestion: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("model: gym-nano\nlerning_rate: 1\n")
    command = [sys.executable, "-m", module, *words]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    assert suggestion in said
    assert len(re.findall("did you mean", said, re.IGNORECASE)) == 1


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "row", "0 rows"), (1, "entry", "1 entry"), (2, "entry", "2 entries"), (1200, "key", "1,200 keys")],
)
def test_a_noun_agrees_with_its_number(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_a_file_of_one_row_has_one_row(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from gym_fed.cli.main import app

    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["data", "mix", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "mixed.jsonl")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 row in" in done.output


@pytest.mark.parametrize(("options", "is_shown"), [([], False), (["-W", "default"], True)])
def test_a_warning_of_a_library_reaches_the_terminal_only_where_python_was_asked_for_warnings(
    options: list[str], is_shown: bool
) -> None:
    code = (
        "import sys, typer, warnings\nfrom gym_fed.core.console import run_app\napp = typer.Typer()\n"
        "@app.command()\ndef work() -> None:\n    warnings.warn('could not find /x/.y.partial')\n    print('done')\n"
        "sys.argv = ['work']\nrun_app(app)\n"
    )
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert ("UserWarning: could not find" in done.stderr) is is_shown
