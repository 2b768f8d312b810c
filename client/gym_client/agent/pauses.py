"""Pauses of the agent, due to hours, battery, ``pause`` in ``policy.yaml``, `gym-client pause` or a full disk."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import psutil

from gym_client.agent.policy import Policy
from gym_client.display import Display
from gym_client.hub.backoff import LINE_SECONDS
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.system_errors import system_error
from gym_fed.core.text import readable_bytes

_DISK_POLL_SECONDS = 1.0
_RETRY_SECONDS = 300.0
"""Interval in seconds between retries while the free space is unchanged, since a quota may have been raised."""

T = TypeVar("T")

_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.2
_STAGE_SECONDS = 600.0
"""How long ``hours`` and ``on_battery`` are ignored after the last stage of a secure aggregation round, in seconds."""

_FILE = "paused"


def set_paused(home: Home) -> None:
    """Pause this home's agent, now and after a restart."""
    write_atomically(home.folder / _FILE, b"")


def set_resumed(home: Home) -> None:
    """Resume this home's agent.

    Raises:
        GymError: ``POLICY_REFUSED`` if ``policy.yaml`` also has ``pause: true``.
    """
    (home.folder / _FILE).unlink(missing_ok=True)
    if Policy.load(home.policy_path).pause:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"{home.policy_path} has pause: true, so the agent is still paused",
            "remove the line",
        )


def is_paused(home: Home) -> bool:
    """Return True between `gym-client pause` and `gym-client resume`."""
    return (home.folder / _FILE).exists()


def on_battery() -> bool:
    """Return True if this machine runs on battery."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


@dataclass(frozen=True)
class PolicyStamp:
    """Identifies a state of ``policy.yaml``. Created before the file is read, so that no later change is missed."""

    found: tuple[int, int, int] | None
    """Modification time, size and inode; None if the file does not exist."""

    @classmethod
    def of(cls, home: Home) -> PolicyStamp:
        """Return the stamp of the file as it is now."""
        try:
            status = os.stat(home.policy_path)
        except OSError:
            return cls(None)
        return cls((status.st_mtime_ns, status.st_size, status.st_ino))


@dataclass(frozen=True)
class _Wait:
    """The reason for a pause. ``at_once`` also interrupts running training; ``ends`` stops the agent."""

    reason: str
    at_once: bool = False
    ends: bool = False


class Pauses:
    """Decides whether work may run, based on ``policy.yaml``, which is reloaded when it changes.

    Args:
        home: The home with ``policy.yaml`` and the marker of `gym-client pause`.
        policy: Initial policy, used until ``policy.yaml`` changes.
        take: Called with the new policy after a change.
        display: Displays the reason for waiting.
        stop: Event that ends the waiting.
        now: Returns the local time of day.
        battery: Returns True if the machine runs on battery.
        clock: Returns monotonic time in seconds.
        stamp: Stamp of ``policy.yaml`` when ``policy`` was read; None for the current stamp.
    """

    def __init__(
        self,
        home: Home,
        policy: Policy,
        take: Callable[[Policy], None],
        display: Display,
        stop: threading.Event,
        now: Callable[[], datetime] = datetime.now,
        battery: Callable[[], bool] = on_battery,
        clock: Callable[[], float] = time.monotonic,
        stamp: PolicyStamp | None = None,
    ) -> None:
        self._home, self._policy, self._take = home, policy, take
        self._display, self._stop = display, stop
        self._now, self._battery, self._clock = now, battery, clock
        self._stamp, self._broken = stamp or PolicyStamp.of(home), ""
        self._looked = -math.inf
        self._pause: _Wait | None = None
        self._round_until = 0.0
        self.interrupted = False
        """True if work was interrupted for a pause; reset by ``wait``."""
        self.on_pause: Callable[[bool], None] = lambda paused: None
        """Called with True when a pause begins or its reason changes, and with False when it ends."""

    def due(self) -> bool:
        """Return True if no new work may start at the moment.

        Raises:
            GymError: ``POLICY_REFUSED`` on battery power if the policy does not allow work on it.
        """
        pause = self._look()
        if pause is not None and pause.ends:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                pause.reason,
                "connect it to mains power and run the same command again",
            )
        return pause is not None or self.interrupted

    def interrupts(self) -> bool:
        """Return True if running work must stop at its next checkpoint."""
        pause = self._look()
        self.interrupted = self.interrupted or (pause is not None and pause.at_once)
        return self.interrupted

    def note_stage(self, goes_on: bool) -> None:
        """Record an answered task; ``goes_on`` is True if its secure round will need this machine again."""
        self._round_until = self._clock() + _STAGE_SECONDS if goes_on else 0.0

    def wait(self) -> None:
        """Block until work may run, and display the reason for waiting.

        Raises:
            GymError: ``INTERRUPTED`` if stopped; errors from ``due``.
        """
        self.interrupted, shown = False, ""
        while self.due() and not self._stop.is_set():
            reason = self._pause.reason if self._pause is not None else ""
            if reason != shown:
                self.on_pause(True)
                shown = reason
                self._display.report("paused", reason)
                self._display.busy(reason)
            self._stop.wait(_POLL_SECONDS)
        if self._stop.is_set():
            raise GymError(ErrorCode.INTERRUPTED, "stopped", "run the same command again to resume")
        if shown:
            self.on_pause(False)
            self._display.busy("")
            self._display.report("resumed", "resuming")

    def _look(self) -> _Wait | None:
        """Return the reason for a pause, if any; recomputed at most once per second."""
        if self._clock() - self._looked >= _LOOK_SECONDS:
            self._looked = self._clock()
            self._read_again()
            self._pause = self._found()
        return self._pause

    def _found(self) -> _Wait | None:
        policy = self._policy
        if is_paused(self._home):
            return _Wait("paused: run `gym-client resume` to continue", at_once=True)
        if policy.pause:
            return _Wait("paused: policy.yaml has pause: true", at_once=True)
        if self._broken:
            return _Wait(f"waiting until policy.yaml can be read: {self._broken}")
        if self._clock() < self._round_until:
            return None
        if policy.on_battery == "refuse" and self._battery():
            return _Wait(
                "this machine is running on battery, and policy.yaml has on_battery: refuse", ends=True
            )
        if policy.on_battery == "pause" and self._battery():
            return _Wait("waiting for mains power (on_battery in policy.yaml)", at_once=True)
        begins = policy.next_hours(self._now())
        return _Wait(f"waiting until {begins} (hours in policy.yaml)") if begins else None

    def _read_again(self) -> None:
        stamp = PolicyStamp.of(self._home)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._policy = Policy.load(self._home.policy_path)
        except GymError as error:
            self._broken = error.message
            return
        self._broken = ""
        self._take(self._policy)
        self._display.report("policy", "policy.yaml has changed; its new limits apply now")


class DiskRoom:
    """Retries work that failed because the disk was full, once there is more free space.

    Args:
        home: A folder on the disk.
        display: Displays the start and the end of waiting.
        stop: Event that ends the waiting.
        clock: Returns monotonic time in seconds.
    """

    def __init__(
        self, home: Home, display: Display, stop: threading.Event, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home, self._display, self._stop, self._clock = home, display, stop, clock

    def needed(self, action: Callable[[], T], lost: Callable[[], GymError | None] = lambda: None) -> T:
        """Call ``action`` until it no longer fails because of a full disk; it must be safe to repeat.

        Args:
            action: Function that raises ``DISK_FULL``, or the system's error, if the disk is full.
            lost: Returns an error once waiting is pointless, such as after a lost lease; otherwise None.

        Raises:
            GymError: The error from ``lost``; ``INTERRUPTED`` after ``stop``; any other error from ``action``.
        """
        waited = False
        while True:
            try:
                result = action()
            except Exception as error:
                full = system_error(error)
                if full is None or full.code is not ErrorCode.DISK_FULL:
                    raise
            else:
                if waited:
                    self._display.report("room", "the disk has free space again; work continues")
                return result
            # Wait outside the except block, so that the failed attempt has released its resources, such as a lock.
            self._wait(full, lost)
            waited = True

    def _wait(self, full: GymError, lost: Callable[[], GymError | None]) -> None:
        disk = shutil.disk_usage(self._home.folder)
        more = max(64 << 10, min(64 << 20, disk.total // 50))
        began = reported = self._clock()
        self._report(full, disk.free, more)
        self._display.busy("waiting for free disk space")
        while shutil.disk_usage(self._home.folder).free < disk.free + more:
            if self._stop.wait(_DISK_POLL_SECONDS):
                raise GymError(ErrorCode.INTERRUPTED, f"stopped: {full.message}", full.hint)
            if (why := lost()) is not None:
                raise why
            now = self._clock()
            if now - began >= _RETRY_SECONDS:
                return
            if now - reported >= LINE_SECONDS:
                reported = now
                self._report(full, shutil.disk_usage(self._home.folder).free, more)

    def _report(self, full: GymError, free_bytes: int, more_bytes: int) -> None:
        text = (
            f"disk-full: {full.message}: {readable_bytes(free_bytes)} are free for {self._home.folder}; work continues "
            f"when {readable_bytes(more_bytes)} more are free (Ctrl-C stops)"
        )
        self._display.report("disk-full", text, error=full.to_dict(), free_bytes=free_bytes)
