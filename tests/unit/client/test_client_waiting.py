"""A hub that is away, and work that takes long: what the contributor sees, and what the hub is spared."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from gym_client.cli.join import join
from gym_client.cli.join_options import JoinOptions
from gym_client.cli.terminal import Consent
from gym_client.display import (
    Display,
    EventReporter,
    JsonDisplay,
    PhaseLines,
    PlainDisplay,
    TerminalDisplay,
    make_display,
    warnings_shown,
)
from gym_client.hub import backoff, stream
from gym_client.hub.backoff import LINE_SECONDS, Outage, is_passing, readable_seconds
from gym_client.identity.home import Home
from rich.console import Console

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.reproducibility import RunWarning
from tests.support.agent_scene import Recorder, Scene, empty
from tests.support.tiny_hub import TinyHub
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

AWAY = GymError(ErrorCode.UNAVAILABLE, "cannot reach hub:9443: refused", "check the address")


class Yes(Consent):
    """Agrees to everything."""

    def server_key(self, address: object, fingerprint: str) -> bool:
        return True

    def local_copy(self, name: str) -> bool:
        return True

    def base(self, offer: object) -> bool:
        return True

    def offer(self, offer: object) -> bool:
        return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Silence(Recorder):
    """Keeps what breaks a silence, too."""

    def still(self, what: str, seconds: float) -> None:
        self.events.append(("still", f"{what} {seconds:g}"))


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_an_outage_is_reported_once_then_once_a_minute_and_once_when_it_is_over() -> None:
    display, clock = Recorder(), Clock()
    outage = Outage(display, clock)
    outage.back()
    assert display.events == []
    for _ in range(40):  # tries every five seconds, 195 seconds in all
        outage.away(AWAY)
        clock.now += 5
    outage.back()
    outage.back()
    names = [name for name, _ in display.events]
    assert names == ["away", "away", "away", "away", "back"]
    assert "cannot reach hub:9443" in display.texts("away")[0]
    assert "retrying (Ctrl-C stops); check the address" in display.texts("away")[0]
    assert display.texts("away")[1] == f"still unreachable after {LINE_SECONDS:.0f} s: {AWAY.message}"
    assert display.texts("back") == ["the server is back after 3 min"]
    outage.away(AWAY)
    assert "retrying" in display.texts("away")[-1]  # the next outage begins anew


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (180, "3 min"), (7500, "2 h 5 min")]
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


def test_a_busy_hub_is_waited_for() -> None:
    assert is_passing(GymError(ErrorCode.BUSY, "as many calls wait as may"))
    assert not is_passing(GymError(ErrorCode.QUOTA_EXCEEDED, "too much"))


def test_first_contact_waits_for_the_hub_and_goes_on_when_it_is_there(tmp_path: Path, hub: TinyHub) -> None:
    hub.stop()
    display = Recorder()
    options = JoinOptions(server=hub.address, fingerprint=hub.fingerprint)
    caught: list[GymError] = []

    def run() -> None:
        with pytest.raises(GymError) as error:
            join(Home.open(tmp_path / "home"), options, Yes(), display)
        caught.append(error.value)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: display.texts("away"))
    hub.start()
    thread.join(SECONDS)
    assert (
        caught[0].code is ErrorCode.POLICY_REFUSED
    )  # it came as far as the terms, of which this hub has none
    assert "the recipe that the server announces" in caught[0].message
    assert [name for name, _ in display.events] == ["away", "back"]


def test_with_no_wait_first_contact_fails_at_once(tmp_path: Path, hub: TinyHub) -> None:
    hub.stop()
    display = Recorder()
    with pytest.raises(GymError) as caught:
        join(Home.open(tmp_path / "home"), JoinOptions(server=hub.address, wait=False), Yes(), display)
    hub.start()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert display.events == []


def test_somebody_else_at_the_port_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(GymError, match="not with TLS"):
            join(Home.open(tmp_path / "home"), JoinOptions(server=address), Yes(), Recorder())


def test_ctrl_c_ends_the_waiting_of_a_real_join(tmp_path: Path, hub: TinyHub) -> None:
    hub.stop()
    log = tmp_path / "log"
    with log.open("w") as file:
        process = WarmProcess(
            ["gym-client", "join", "--server", hub.address, "--home", tmp_path / "h"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        wait_until(lambda: "retrying (Ctrl-C stops)" in log.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    hub.start()
    assert log.read_text().count("retrying") == 1


def test_an_idle_agent_reports_that_the_hub_is_back_though_there_is_no_task(scene: Scene) -> None:
    agent = scene.agent(empty)

    def end() -> None:
        with pytest.raises(GymError):
            agent.run()

    thread = threading.Thread(target=end)
    thread.start()
    wait_until(lambda: scene.display.texts("waiting"))
    scene.hub.stop()
    wait_until(lambda: scene.display.texts("away"))
    scene.hub.start()
    wait_until(lambda: scene.display.texts("back"))
    agent.stop()
    thread.join(SECONDS)
    assert len(scene.display.texts("away")) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_no_heartbeat_is_under_way_while_a_task_is_answered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(stream, "_BEATS_PER_LEASE", 30_000)
    calls: list[str] = []

    def note(method: str, request: Any) -> None:
        calls.append(method)
        if method == "Submit":
            time.sleep(0.3)  # a judgement takes its time; at one beat a millisecond
            calls.append("judged")

    def work(message: Any, context: Any) -> Any:
        wait_until(lambda: calls.count("Heartbeat") > 3)
        if fails:
            raise GymError(ErrorCode.POLICY_REFUSED, "not this one")
        return empty(message, context)

    scene.hub.hook = note
    scene.hub.give(scene.task("m1"))
    scene.hub.finish()
    scene.agent(work).run()
    answered = calls.index("Submit")
    assert "Heartbeat" in calls[:answered]
    assert "Heartbeat" not in calls[answered:]


def test_an_answer_that_is_sent_again_prolongs_the_lease_first(scene: Scene) -> None:
    calls: list[str] = []

    def once_away(method: str, request: Any) -> None:
        calls.append(method)
        if method == "Submit" and calls.count("Submit") == 1:
            raise GymError(ErrorCode.UNAVAILABLE, "restarting")

    scene.hub.hook = once_away
    scene.hub.give(scene.task("m1"))
    assert scene.agent(empty).run(max_rounds=1).num_submitted == 1
    first, second = (i for i, name in enumerate(calls) if name == "Submit")
    assert "Heartbeat" in calls[first:second]


@pytest.mark.parametrize(
    "method", ["Account", "Work", "Download", "Heartbeat", "BeginUpload", "Upload", "Submit"]
)
def test_a_call_in_which_the_hub_fails_once_is_made_again_and_the_task_is_answered(
    scene: Scene, method: str
) -> None:
    failed = threading.Event()

    def once(called: str, request: Any) -> None:
        if called == method and not failed.is_set():
            failed.set()
            raise GymError(ErrorCode.INTERNAL, f"{method} failed on the server")

    def work(message: Any, context: Any) -> RecordDict:
        wait_until(lambda: method != "Heartbeat" or failed.is_set())
        return RecordDict({"arrays": ArrayRecord([np.zeros(3)])})

    scene.hub.hook = once
    content = RecordDict({"arrays": ArrayRecord([np.ones(3)])})
    scene.hub.give(scene.task("m1", content))
    scene.hub.finish()
    assert scene.agent(work).run().num_submitted == 1
    assert failed.is_set()
    assert not scene.hub.submitted["m1"].HasField("error")
    assert scene.display.texts("failed") == []


def test_a_task_whose_upload_fails_in_the_hub_every_time_is_reported_as_failed_after_some_tries(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 0.01)
    calls: list[str] = []

    def always(method: str, request: Any) -> None:
        calls.append(method)
        if method == "BeginUpload":
            raise GymError(ErrorCode.INTERNAL, "BeginUpload failed on the server")

    scene.hub.hook = always
    scene.hub.give(scene.task("m1"))
    scene.hub.finish()
    arrays = RecordDict({"arrays": ArrayRecord([np.zeros(3)])})
    assert scene.agent(lambda message, context: arrays).run().num_submitted == 0
    assert calls.count("BeginUpload") == 1 + backoff.MAX_INTERNAL
    assert scene.error_of("m1").code == ErrorCode.INTERNAL.exit_code


def test_a_run_whose_last_balance_fails_in_the_hub_ends_with_its_receipts(scene: Scene) -> None:
    def after_the_answer(method: str, request: Any) -> None:
        if method == "Account" and scene.hub.submitted:
            raise GymError(ErrorCode.INTERNAL, "Account failed on the server")

    scene.hub.hook = after_the_answer
    scene.hub.give(scene.task("m1"))
    scene.hub.finish()
    result = scene.agent(empty).run()
    assert (result.num_submitted, result.balance) == (1, None)
    assert "Account failed on the server" in scene.display.texts("away")[-1]


def test_a_silence_is_broken_by_what_goes_on_and_not_when_nothing_does() -> None:
    inner, clock = Silence(), Clock()
    narrator = EventReporter(inner, often=False, clock=clock)
    narrator.busy("loading the model")
    shown = []
    for _ in range(100):  # ten seconds
        clock.now += 0.1
        narrator.report_activity()
        shown = inner.texts("still")
    assert [float(text.split()[-1]) for text in shown] == pytest.approx([1.5, 3.0, 6.0], abs=0.11)
    narrator.progress("train", 1, 10, 2.0)  # a step that takes long
    clock.now += 60
    narrator.report_activity()
    assert inner.texts("still") == [*shown, "training 1/10 60"]
    for silent in (lambda: narrator.progress("train", 10, 10, 2.0), lambda: narrator.busy("")):
        silent()
        clock.now += 60
        narrator.report_activity()
        assert len(inner.texts("still")) == len(shown) + 1
    narrator.close()


def test_lines_of_a_phase_are_ten_and_more_where_a_step_takes_long() -> None:
    clock = Clock()
    lines = PhaseLines(clock)
    shown = [step for step in range(101) if lines.wants("train", step, 100)]
    assert shown == list(range(0, 101, 10))
    slow = []
    for step in range(10):
        clock.now += 2
        slow += [step] if lines.wants("encode", step, 100) else []
    assert slow == [0, 1, 3, 6]


def test_news_begin_the_silence_anew() -> None:
    inner, clock = Silence(), Clock()
    narrator = EventReporter(inner, often=True, clock=clock)
    narrator.busy("preparing")
    for _ in range(10):
        clock.now += 1.4
        narrator.report("notice", "round 2 begins")
        narrator.report_activity()
    assert inner.texts("still") == []
    narrator.close()


def test_on_a_terminal_the_silence_is_broken_by_a_line_that_moves_and_goes() -> None:
    nowhere = open("/dev/null", "w")  # noqa: SIM115
    console = Console(force_terminal=True, width=60, file=nowhere, record=True, markup=False)
    display = TerminalDisplay(console)
    display.still("loading [/x] \x1b[2J", 2.0)
    display.still("loading [/x] \x1b[2J", 3.0)
    display.report("joined", "joined [/y]")
    display.close()
    shown = console.export_text()
    assert "joined [/y]" in shown
    assert "\x1b[2J" not in shown


@pytest.mark.parametrize("as_json", [True, False])
def test_every_display_breaks_a_silence(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    display: Display = make_display(console, as_json)
    display.still("loading gym-nano", 2.0)
    display.close()
    said = capsys.readouterr().out if as_json else console.export_text()
    assert "loading gym-nano" in said


def test_from_yes_to_the_first_step_every_long_stage_has_a_name(scene: Scene) -> None:
    stages: list[str] = []

    class Stages(Recorder):
        def busy(self, what: str) -> None:
            stages.append(what)

    scene.display = Stages()
    scene.hub.give(scene.task("m1"))
    scene.agent(empty).run(max_rounds=1)
    named = [stage for stage in stages if stage]
    assert named == [
        "fetching the verdicts on earlier updates",
        "preparing the task: data, model, optimiser",
        "waiting for the server's receipt",
    ]


def test_lines_of_what_is_moved_are_in_readable_bytes_and_those_of_steps_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = PlainDisplay(Console(stderr=True))
    display.progress("upload", 60_000, 140_472, None)
    display.progress("train", 3, 30, 0.5)
    assert capsys.readouterr().err == "uploading 60.0 kB of 140.5 kB\ntraining 3/30, loss 0.5000\n"


def test_in_json_a_slow_step_stays_a_step_of_its_phase(capsys: pytest.CaptureFixture[str]) -> None:
    display = JsonDisplay()
    display.progress("train", 3, 30, 0.5)
    display.still("training 3/30", 3.0)
    display.progress("train", 30, 30, 0.4)
    display.still("waiting", 2.0)
    display.progress("upload", 0, 10, None)
    display.busy("preparing")
    display.still("preparing", 1.0)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [
        (event["event"], event.get("phase"), event.get("done"), event.get("seconds")) for event in events
    ]
    assert kinds == [
        ("progress", "train", 3, None),
        ("progress", "train", 3, 3.0),
        ("progress", "train", 30, None),
        ("busy", None, None, 2.0),
        ("progress", "upload", 0, None),
        ("busy", None, None, 1.0),
    ]
    assert events[1]["loss"] == 0.5


def test_what_training_warns_of_is_news_and_other_warnings_are_pythons() -> None:
    display, others = Recorder(), []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *place: others.append(str(message))
        with warnings_shown(display):
            warnings.warn("resumed in a different environment", RunWarning, stacklevel=1)
            warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert ("warning", "warning: resumed in a different environment") in display.events
    assert others == ["old"]
