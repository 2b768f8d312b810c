"""`gym batch` as a process: killed midway and continued, it has what a run without a kill has, each line once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from tests.support import warm
from tests.support.hub import BIN
from tests.support.wait import SECONDS

COUNT = 12


@pytest.fixture
def requests(tmp_path: Path, tiny_base: Path) -> Path:
    """Chats, completions and embeddings of a tiny model; half of the texts are drawn, one fits no context."""
    lines = []
    for number in range(COUNT):
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": number % 2}
        if number % 3 == 0:
            url, body["prompt"] = "/v1/completions", "x" * (500 if number == 9 else number + 1)
        elif number % 3 == 1:
            url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "y" * number}]
        else:
            url, body = "/v1/embeddings", {"model": "tiny", "input": "z" * number}
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    """What was answered by custom_id, without what names the moment; no id comes twice."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {
        line["custom_id"]: (
            line["id"],
            line["response"]["body"].get("choices") or line["response"]["body"].get("data"),
        )
        for line in lines
    }


def near(found: dict[str, Any]) -> dict[str, Any]:
    """The same, but for the last bits of vectors, which depend on the requests that happen to share a step."""
    for _, entries in found.values():
        for entry in entries or ():
            if "embedding" in entry:
                entry["embedding"] = pytest.approx(entry["embedding"], abs=1e-5)
    return found


def test_a_killed_batch_goes_on_and_has_the_answers_of_an_unbroken_one(
    requests: Path, tiny_base: Path
) -> None:
    folder = requests.parent
    words = [
        "batch",
        str(requests),
        "--base",
        str(tiny_base),
        "--set",
        "engine.max_concurrent=2",
        "--seed",
        "5",
    ]

    whole = CliRunner().invoke(
        app, [*words, str(folder / "whole.jsonl"), "--errors", str(folder / "refused.jsonl")]
    )
    assert whole.exit_code == 20  # one request failed
    assert len(answers(folder / "whole.jsonl")) == COUNT - 1
    assert list(answers(folder / "refused.jsonl")) == ["r9"]

    broken = [*words, str(folder / "broken.jsonl"), "--errors", str(folder / "broken-refused.jsonl")]
    killed = warm.run(
        [BIN / "gym", *broken],
        cwd=folder,
        env={**os.environ, "GYM_FAILPOINTS": "batch-line:5"},
        timeout=SECONDS,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    some = len(answers(folder / "broken.jsonl"))
    assert 4 <= some <= 5

    again = CliRunner().invoke(app, [*broken, "--json"])
    assert again.exit_code == 20
    figures = json.loads(again.stdout)
    assert (figures["total"], figures["failed"], figures["resumed"]) == (COUNT, 1, 5)
    assert answers(folder / "broken.jsonl") == near(answers(folder / "whole.jsonl"))
    assert list(answers(folder / "broken-refused.jsonl")) == ["r9"]

    other = CliRunner().invoke(app, [*broken, "--set", "engine.kernel=lookup"])
    assert "kernel was 'auto', but is now 'lookup'" in str(other.exception)
