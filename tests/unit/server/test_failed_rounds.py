"""Rounds that an internal error of the hub ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


class GivesOnce:
    """A grid that forgets a reply when it has given it, as a SuperLink does."""

    def __init__(self, replies: list[str]) -> None:
        self._replies = set(replies)

    def pull_messages(self, message_ids: list[str]) -> Iterator[Any]:
        for message_id in set(message_ids) & self._replies:
            self._replies.remove(message_id)
            yield SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=message_id))


def test_a_failure_of_the_disk_loses_no_outcome_of_a_reply_that_a_superlink_gave(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = PacedRoom(tmp_path / "hub", tiny_base, [Member("fast", 20)])
    judged: list[str] = []

    def outcome(server_round: int, reply: Any) -> str:
        judged.append(reply.metadata.reply_to_message_id)
        if len(judged) == 2:
            raise OSError("the disk is full")
        return "replied"

    monkeypatch.setattr(room.strategy._replies, "outcome", outcome)
    try:
        number = room.fed.round_store.open_next().server_round
        room.fed.round_store.record_tasks(number, {1: "a", 2: "b"})
        with pytest.raises(OSError, match="disk is full"):
            room.strategy._pull(number, GivesOnce(["a", "b"]))
        outcomes = dict(room.fed.round_store.tasks(number).values())
    finally:
        room.close()
    assert outcomes[judged[0]] == "replied"
    assert outcomes[judged[1]] == ""
