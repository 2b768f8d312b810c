"""Rounds that an internal error of the hub ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.paced_room import Member, PacedRoom


@pytest.mark.parametrize("kind", [ValueError, lambda text: GymError(ErrorCode.DELTA_INVALID, text)])
def test_the_ledger_has_the_kind_of_an_error_that_ended_a_round_and_no_path_of_the_hub(
    tmp_path: Path, tiny_base: Path, kind: Callable[[str], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    room = PacedRoom(tmp_path / "hub", tiny_base, [Member("fast", 20)])
    try:
        number = room.fed.round_store.open_next().server_round
        ended = room.strategy._abort_for(number, kind(f"{tmp_path}/soup.gymdelta: malformed"))
        ledger = "\n".join(entry.body_json for entry in room.fed.ledger.entries())
    finally:
        room.close()
    assert ended.state == "aborted"
    assert ended.reason in ledger
    assert any(word in ended.reason for word in ("ValueError", "delta-invalid"))
    assert str(tmp_path) not in ledger
    assert "soup.gymdelta" in caplog.text, "the coordinator's log has it"
