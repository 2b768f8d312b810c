"""When an agent waits: hours, battery, pauses, and a policy that changes while it runs."""

from __future__ import annotations

import errno
import shutil
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from gym_client.agent import pauses
from gym_client.agent.hooks import current_hooks
from gym_client.agent.pauses import DiskRoom, Pauses, PolicyStamp, set_paused, set_resumed
from gym_client.agent.policy import Policy
from gym_client.agent.work import use_threads
from gym_client.display import Display
from gym_client.identity.home import Home

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.agent_scene import Recorder, Scene, empty
from tests.support.wait import SECONDS
from tests.unit.client.test_client_waiting import Clock, wait_until

DAY = datetime(2026, 11, 24, 12, 0)


class Waits:
    """Pauses with a clock, a time of day and a battery that a test sets."""

    def __init__(self, home: Home, **policy: Any) -> None:
        self.clock, self.day, self.on_battery = Clock(), DAY, False
        self.taken: list[Policy] = []
        self.display, self.stop = Recorder(), threading.Event()
        self.pauses = Pauses(
            home,
            Policy(**policy),
            self.taken.append,
            self.display,
            self.stop,
            now=lambda: self.day,
            battery=lambda: self.on_battery,
            clock=self.clock,
        )

    def due(self) -> bool:
        self.clock.now += 1
        return self.pauses.due()

    def interrupts(self) -> bool:
        self.clock.now += 1
        return self.pauses.interrupts()


@pytest.mark.parametrize(
    ("hours", "now", "begins"),
    [
        ([], "12:00", ""),
        (["22:00-07:00"], "21:59", "22:00"),
        (["22:00-07:00"], "22:00", ""),
        (["22:00-07:00"], "06:59", ""),
        (["22:00-07:00"], "07:00", "22:00"),
        (["12:00-13:00", "09:00-10:00"], "10:30", "12:00"),
        (["12:00-13:00", "09:00-10:00"], "23:00", "09:00"),
        (["20:00-24:00"], "23:59", ""),
        (["20:00-24:00"], "00:00", "20:00"),
        (["08:00-09:00"], "09:00", "08:00"),
    ],
)
def test_hours_say_when_a_round_may_begin(hours: list[str], now: str, begins: str) -> None:
    time = DAY.replace(hour=int(now[:2]), minute=int(now[3:]))
    assert Policy(hours=hours).next_hours(time) == begins


@pytest.mark.parametrize(
    "span", ["22-7", "22:00", "25:00-07:00", "22:60-07:00", "07:00-07:00", "22:00 - 07:00"]
)
def test_hours_that_are_none_are_refused_by_name(home: Home, span: str) -> None:
    home.policy_path.write_text(f'hours: ["{span}"]\n')
    with pytest.raises(GymError, match="hours") as caught:
        Policy.load(home.policy_path)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert span in caught.value.message


def test_a_policy_that_changes_between_its_reading_and_the_first_look_is_taken(home: Home) -> None:
    stamp, policy = PolicyStamp.of(home), Policy.load(home.policy_path)
    home.policy_path.write_text("pause: true\n")
    taken: list[Policy] = []
    pauses = Pauses(home, policy, taken.append, Recorder(), threading.Event(), stamp=stamp)
    assert pauses.due()
    assert taken == [Policy(pause=True)]


def test_the_beginning_and_the_end_of_a_pause_are_passed_on(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, heard = Waits(home), list[bool]()
    waits.pauses.on_pause = heard.append
    waits.pauses.wait()
    assert heard == []
    set_paused(home)

    def later(seconds: float) -> bool:
        waits.clock.now += 1
        set_resumed(home)
        return False

    monkeypatch.setattr(waits.stop, "wait", later)
    waits.clock.now += 1
    waits.pauses.wait()
    assert heard == [True, False]


@pytest.mark.parametrize("before", [1, 3])
def test_without_a_number_of_threads_torch_has_those_of_before(
    monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    number = [before]
    monkeypatch.setattr("torch.get_num_threads", lambda: number[-1])
    monkeypatch.setattr("torch.set_num_threads", number.append)
    for threads in (None, 2, 4, None, None):
        use_threads(threads)
    assert number == [before, 2, 4, before]


def test_outside_the_hours_no_round_begins_and_one_that_is_on_goes_on(home: Home) -> None:
    waits = Waits(home, hours=["22:00-07:00"])
    assert waits.due()
    assert not waits.interrupts()
    waits.day = DAY.replace(hour=22)
    assert not waits.due()


def test_without_mains_power_work_goes_on_waits_or_ends_as_the_policy_says(home: Home) -> None:
    for setting, due in (("train", False), ("pause", True)):
        waits = Waits(home, on_battery=setting)
        assert not waits.due()
        waits.on_battery = True
        assert waits.due() is due
        assert waits.interrupts() is due
    refusing = Waits(home, on_battery="refuse")
    refusing.on_battery = True
    assert not refusing.interrupts()
    with pytest.raises(GymError, match="on_battery: refuse") as caught:
        refusing.due()
    assert caught.value.code is ErrorCode.POLICY_REFUSED


def test_a_wait_says_until_when_and_ends_with_its_reason(home: Home) -> None:
    waits = Waits(home, hours=["22:00-07:00"])
    thread = threading.Thread(target=waits.pauses.wait)
    thread.start()
    wait_until(lambda: waits.display.texts("paused") == ["waiting until 22:00 (hours in policy.yaml)"])
    set_paused(home)
    waits.clock.now += 1
    wait_until(lambda: "gym-client resume" in waits.display.texts("paused")[-1])
    set_resumed(home)
    waits.day = DAY.replace(hour=23)
    waits.clock.now += 1
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert waits.display.texts("resumed") == ["resuming"]


def test_a_stop_ends_a_wait(home: Home) -> None:
    waits = Waits(home, pause=True)
    waits.stop.set()
    with pytest.raises(GymError) as caught:
        waits.pauses.wait()
    assert caught.value.code is ErrorCode.INTERRUPTED


def test_a_changed_policy_is_taken_and_one_that_cannot_be_read_is_waited_for(home: Home) -> None:
    waits = Waits(home)
    assert not waits.due()
    home.policy_path.write_text("max_steps: 7\n")
    assert not waits.due()
    assert [policy.max_steps for policy in waits.taken] == [7]
    home.policy_path.write_text("max_stepz: 9\n")
    assert waits.due()
    assert len(waits.taken) == 1
    home.policy_path.write_text("pause: true\n")
    assert waits.interrupts()
    home.policy_path.unlink()
    waits.pauses.interrupted = False
    assert not waits.due()
    assert waits.taken[-1] == Policy()


def test_the_stages_of_a_secure_round_are_finished_before_hours_and_battery_count(home: Home) -> None:
    waits = Waits(home, hours=["22:00-07:00"])
    waits.pauses.note_stage(goes_on=True)
    assert not waits.due()
    set_paused(home)
    assert waits.due()
    set_resumed(home)
    waits.pauses.note_stage(goes_on=False)
    assert waits.due()


def test_a_running_agent_that_is_paused_keeps_its_work_and_goes_on_with_the_same_task(scene: Scene) -> None:
    calls: list[str] = []

    def work(message: Message, context: Context) -> RecordDict:
        calls.append(message.metadata.message_id)
        if len(calls) == 1:
            set_paused(scene.home)
            wait_until(current_hooks().should_stop)
            raise GymError(ErrorCode.INTERRUPTED, "stopped at a checkpoint")
        return RecordDict()

    scene.hub.give(scene.task("m1"))
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(scene.agent(work).run(max_rounds=1)))
    thread.start()
    wait_until(lambda: scene.display.texts("paused"))
    assert scene.hub.submitted == {}  # the hub hears neither an answer nor a failure
    beats = len(scene.hub.heartbeats)
    assert calls == ["m1"]
    set_resumed(scene.home)
    wait_until(lambda: scene.display.texts("resumed"))
    scene.hub.give(scene.task("m1"))  # what a hub does when the installation is back within its lease
    thread.join(SECONDS)
    assert done[0].num_submitted == 1
    assert calls == ["m1", "m1"]
    assert len(scene.hub.heartbeats) > beats
    assert scene.display.texts("failed") == []


def test_a_paused_agent_takes_no_task(scene: Scene) -> None:
    set_paused(scene.home)
    scene.hub.give(scene.task("m1"))
    agent = scene.agent(empty)

    def run() -> None:
        with pytest.raises(GymError, match="stopped"):
            agent.run()

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: scene.display.texts("paused"))
    assert scene.hub.events.qsize() == 1
    agent.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert scene.display.texts("task") == []


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
