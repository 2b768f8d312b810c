"""Work that a full disk broke off: when it goes on, and what ends the waiting."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from gym_client.agent import pauses
from gym_client.agent.pauses import DiskRoom
from gym_client.display import Display
from gym_client.identity.home import Home

from gym_fed.core.errors import ErrorCode, GymError


class Reports(Display):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def report(self, kind: str, text: str, **fields: object) -> None:
        self.kinds.append(kind)


class Work:
    """Finds a full disk so many times, and then is done."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        return "done"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found = [0]
    usage = lambda _: SimpleNamespace(total=1 << 30, free=found[0])  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(pauses, "_DISK_POLL_SECONDS", 0.01)
    return found


def test_work_is_repeated_once_there_is_more_room_and_both_are_reported(
    tmp_path: Path, free: list[int]
) -> None:
    reports, room = Reports(), None
    room = DiskRoom(Home(tmp_path), reports, threading.Event())
    threading.Timer(0.2, lambda: free.__setitem__(0, 1 << 29)).start()
    assert room.needed(Work(1)) == "done"
    assert reports.kinds == ["disk-full", "room"]


def test_a_lost_lease_and_a_stop_end_the_waiting_and_other_errors_are_not_waited_for(
    tmp_path: Path, free: list[int]
) -> None:
    stop = threading.Event()
    room = DiskRoom(Home(tmp_path), Reports(), stop)
    with pytest.raises(GymError, match="taken back"):
        room.needed(Work(1), lambda: GymError(ErrorCode.LEASE_LOST, "taken back"))
    stop.set()
    with pytest.raises(GymError) as caught:
        room.needed(Work(1))
    assert caught.value.code is ErrorCode.INTERRUPTED
    with pytest.raises(ZeroDivisionError):
        room.needed(lambda: 1 // 0)


def test_a_quota_whose_disk_shows_no_more_room_is_tried_again_after_minutes(
    tmp_path: Path, free: list[int]
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 100
        return now[0]

    room = DiskRoom(Home(tmp_path), Reports(), threading.Event(), clock)
    assert room.needed(Work(2)) == "done"
