"""Questions on the contributor's terminal, and what `status` says of bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import typer
from gym_client.cli.terminal import confirm, traffic_line

from gym_fed.core import console


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The keyboard's end of a terminal that standard input is."""
    master, slave = os.openpty()
    with os.fdopen(slave) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(console.err, "_force_terminal", True)
        yield master
    with suppress(OSError):
        os.close(master)


def test_what_was_typed_before_a_question_was_shown_is_no_answer(
    keyboard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(question: str, err: bool) -> bool:
        os.write(keyboard, b"n\n")
        return sys.stdin.readline() == "y\n"

    monkeypatch.setattr(typer, "confirm", asked)
    os.write(keyboard, b"y\n")
    assert not confirm("Join on these terms?", "joining needs your consent")


@pytest.mark.parametrize(("bytes_up", "counted"), [(0, False), (200, True)])
def test_status_says_when_its_bytes_are_not_those_of_all_updates(bytes_up: int, counted: bool) -> None:
    found: dict[str, Any] = {"bytes_down": 0, "bytes_up": bytes_up, "round_download_bytes": 500}
    found["verdicts"] = [{"bytes": 100}, {"bytes": 100}]
    found["seeding"] = {"received": 0, "served": 0, "served_on_day": 0}
    assert ("are not counted" in traffic_line(found)) is not counted
