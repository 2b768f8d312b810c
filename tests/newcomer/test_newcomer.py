"""Four people come to the project, each with an empty home in a new environment, and reach what they came for.

Each script is typed into a terminal of 80 columns. ``tools.casts`` does it, and refuses a command that fails, or that
takes ten minutes. `python -m tools.casts` records the same scenes for docs/quickstart.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tools.casts.environment import Environment, fresh
from tools.casts.people import ALONE, VARIANT_OWNER, Played, play, play_round

pytestmark = [
    pytest.mark.slow,  # builds the wheel and installs it, with all that it needs, into a new environment: minutes
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return fresh(tmp_path_factory.mktemp("newcomer"))


@pytest.fixture(scope="session")
def round_played(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Played]:
    return play_round(environment, tmp_path_factory.mktemp("round"))


def test_who_trains_alone_ends_with_a_model_that_answers_is_measured_and_exported(
    environment: Environment, tmp_path: Path
) -> None:
    alone = play(ALONE, environment, tmp_path)
    answer = output(alone, "gym chat")
    assert answer[-1] == "aabbcc"
    assert "100.0%" in "\n".join(output(alone, "gym data score"))
    assert len(output(alone, "gym eval")) > 1
    with safe_open(alone.folder / "exported" / "nano-sft" / "model.safetensors", "pt") as weights:
        assert len(list(weights.keys())) > 1


def test_a_variants_owner_gets_its_answer_by_openais_client(environment: Environment, tmp_path: Path) -> None:
    owner = play(VARIANT_OWNER, environment, tmp_path)
    assert output(owner, "gym chat gym-nano --prompt")[-1] != "DXEC!"
    assert output(owner, "gym chat gym-nano --variant")[-1] == "DXEC!"
    assert "gym-nano:me" in "\n".join(output(owner, "gym api"))
    assert output(owner, "python ask.py") == ["DXEC!"]


def test_a_coordinator_ends_with_a_model_to_which_a_friend_contributed(
    round_played: tuple[Played, Played],
) -> None:
    coordinator, friend = round_played
    contributor = entries(friend)[0]["body"]["contributor"]
    assert contributor[:16] in "\n".join(output(coordinator, "gym-server rounds"))
    assert "round 1 committed, version 1" in "\n".join(output(coordinator, "gym-server rounds"))
    assert "1000" in "\n".join(output(coordinator, "gym-server rewards"))
    assert output(coordinator, "gym chat merged")[-1] == "aabbcc"


def test_a_contributor_ends_with_a_receipt_and_a_balance(round_played: tuple[Played, Played]) -> None:
    _, friend = round_played
    shown = output(friend, "gym-client join")
    assert any(line.startswith("joined our community") for line in shown)
    assert any(line.startswith("receipt: admitted update") for line in shown)
    assert "balance: 1,000 credits" in shown
    proved = {entry["kind"]: entry["body"] for entry in entries(friend)}
    assert (proved["verdict"]["verdict"], proved["credit"]["amount"]) == ("merged", 1000)


def output(played: Played, start: str) -> list[str]:
    """Lines that the terminal showed of the command that starts so, up to the next one."""
    lines = [line.text for line in played.lines()]
    (begin,) = (number for number, line in enumerate(lines) if line.startswith(f"$ {start}"))
    rest = lines[begin + 1 :]
    end = next((number for number, line in enumerate(rest) if line.startswith("$ ")), len(rest))
    return [line for line in rest[:end] if line]


def entries(played: Played) -> list[dict[str, Any]]:
    """Of the hub's ledger, what a contributor has receipts for."""
    text = (played.home / ".gym-fed" / "receipts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["proof"]["entry"] for line in text.splitlines()]
