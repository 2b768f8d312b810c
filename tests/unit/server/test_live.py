"""What the coordinator's terminal says while a hub runs: changes once each, bounded, with names made harmless."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gym_server.cli import live
from gym_server.cli.live import HubEvent, Snapshot, TaskProgress, Watcher, changes, look, region
from gym_server.federation import Federation
from gym_server.store.away import StoreAway
from gym_server.store.tables import accounts, messages, nodes, round_tasks, rounds, updates, versions
from sqlalchemy.exc import OperationalError

from gym_fed.console import TextConsole, err, out
from gym_fed.errors import ErrorCode, GymError
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS

NASTY = "ev\x1b[2Jil [/x]"


@pytest.fixture
def fed(tmp_path: Path) -> Any:
    hub = LoopbackHub(tmp_path / "hub")
    yield hub.fed
    hub.close()


def enrol(fed: Federation, number: int, name: str) -> None:
    values = {"contributor": f"c{number}", "name": name, "public_key": bytes([number]), "status": "active"}
    with fed.database.transaction() as tx:
        tx.execute(accounts.insert().values(**values, enrolled_at=0.0))
        tx.execute(
            nodes.insert().values(
                node_id=number, contributor=f"c{number}", instance="i" * 8, connected_until=time.time() + 60
            )
        )


def task(fed: Federation, number: int, progress: str) -> None:
    with fed.database.transaction() as tx:
        tx.execute(round_tasks.insert().values(server_round=1, node_id=number, message_id=f"m{number}"))
    fed.queue.push(number, "1", "train", time.time(), 600.0, b"x")
    with fed.database.transaction() as tx:
        tx.execute(
            messages.update()
            .where(messages.c.node_id == number)
            .values(message_id=f"m{number}", progress=progress)
        )


def test_the_terminal_follows_a_round_from_joining_to_the_loss(fed: Federation) -> None:
    seen: list[str] = []
    before = look(fed)

    def news() -> list[str]:
        nonlocal before
        now = look(fed)
        found = [event.text for event in changes(before, now)]
        before = now
        seen.extend(found)
        return found

    enrol(fed, 1, "ann")
    enrol(fed, 2, NASTY)
    assert news() == ["ann joined", "ev\\x1b[2Jil [/x] joined"]
    with fed.database.transaction() as tx:
        row = {"server_round": 1, "state": "collecting", "base_height": 0, "opened_at": 0.0}
        tx.execute(rounds.insert().values(**row, deadline=time.time() + 100))
    task(fed, 1, "train 0/50")
    task(fed, 2, "")
    assert news() == ["round 1: ann: train 0/50"]
    progress(fed, 1, "train 9/50")
    assert news() == [], "less than a quarter is no news"
    progress(fed, 1, "train 30/50")
    assert news() == ["round 1: ann: train 30/50"]
    shown = rendered(region(before))
    assert "2 connected, 2 asked, 2 awaited" in shown
    assert "s to the deadline" in shown
    assert "train 30/50" in shown
    assert "not begun" in shown
    assert "\x1b[2J" not in shown
    with fed.database.transaction() as tx:
        tx.execute(round_tasks.update().where(round_tasks.c.node_id == 2).values(outcome="failed"))
        tx.execute(updates.insert().values(**update("u1", "admitted", "")))
    assert news() == ["round 1: ev\\x1b[2Jil [/x] failed", "round 1: ann admitted"]
    with fed.database.transaction() as tx:
        tx.execute(updates.update().values(verdict="merged"))
        tx.execute(versions.insert().values(**version()))
    assert news() == ["round 1: ann merged", "version 1 (round 1): loss 1.2500, median of 1, self-reported"]
    assert news() == []
    with fed.database.transaction() as tx:
        tx.execute(versions.update().values(heldout_after=0.5))
    assert look(fed).losses == {1: (1, 0.5, "held-out")}


def test_a_thousand_that_join_at_once_are_a_few_lines(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Snapshot(members={f"c{n}": f"n{n}" for n in range(1000)})
    monkeypatch.setattr(live, "look", lambda _: crowd)
    events: list[HubEvent] = []
    Watcher(fed, events.append, None)._step(Snapshot())
    assert len(events) == live._MAX_LINES + 1
    assert events[-1].text == f"and {1000 - live._MAX_LINES} more changes"
    many = Snapshot(1, "collecting", None, {n: TaskProgress(f"n{n}", "") for n in range(1000)})
    assert len(rendered(region(many)).splitlines()) == live._MAX_SHOWN + 2


def test_the_watcher_reports_while_its_block_runs_and_leaves_the_database_alone(fed: Federation) -> None:
    events: list[HubEvent] = []
    console = TextConsole()
    console.file, console._force_terminal, console.width = io.StringIO(), True, 100
    with Watcher(fed, events.append, console):
        enrol(fed, 1, NASTY)
        end = time.monotonic() + SECONDS
        while not events and time.monotonic() < end:
            time.sleep(0.05)
    assert [event.kind for event in events] == ["joined"]
    assert json.dumps(events[0].fields)
    assert "\x1b[2J" not in console.file.getvalue()


def test_what_changes_before_the_watchers_thread_runs_is_reported(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[HubEvent] = []
    watch = Watcher._watch
    late = threading.Event()

    def later(watcher: Watcher) -> None:
        late.wait(SECONDS)
        watch(watcher)

    monkeypatch.setattr(Watcher, "_watch", later)
    with Watcher(fed, events.append, None):
        enrol(fed, 1, "ann")
        late.set()
    assert [event.kind for event in events] == ["joined"]


def test_the_watcher_outlives_a_database_that_is_away_and_the_log_says_so_once(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[HubEvent] = []
    tries: list[int] = []

    def away(_: Federation) -> Snapshot:
        tries.append(1)
        if len(tries) == 3:
            raise OperationalError("SELECT 1", {}, Exception("locked"))
        raise StoreAway(GymError(ErrorCode.UNAVAILABLE, "postgresql://hub@host/db: gone"))

    monkeypatch.setattr(live, "_POLL_SECONDS", 0.01)
    with Watcher(fed, events.append, None):
        with monkeypatch.context() as patch:
            patch.setattr(live, "look", away)
            end = time.monotonic() + SECONDS
            while len(tries) < 5:
                assert time.monotonic() < end, "the watcher is gone"
                time.sleep(0.01)
        enrol(fed, 1, "ann")
        while not events:
            assert time.monotonic() < end, "the watcher is gone"
            time.sleep(0.01)
    assert [event.kind for event in events] == ["joined"]
    assert caplog.text.count("cannot show the state") == 1


def progress(fed: Federation, number: int, text: str) -> None:
    with fed.database.transaction() as tx:
        tx.execute(messages.update().where(messages.c.node_id == number).values(progress=text))


def update(name: str, verdict: str, reason: str) -> dict[str, Any]:
    return {
        "update_id": name,
        "contributor": "c1",
        "server_round": 1,
        "message_id": "m1",
        "manifest": json.dumps({"metrics": {"train_loss": 1.25}}),
        "signature": b"",
        "nonce": name,
        "delta_sha256": "d",
        "delta_bytes": 1,
        "verdict": verdict,
        "reason": reason,
        "ledger_sequence": 1,
        "received_at": 0.0,
    }


def version() -> dict[str, Any]:
    numbers = {"height": 1, "server_round": 1, "soup_bytes": 1, "num_updates": 1, "committed_at": 0.0}
    return {**numbers, "digest": "d", "soup_sha256": "s"}


def rendered(shown: Any) -> str:
    console = TextConsole()
    console.file, console._force_terminal, console._color_system, console.width = (
        io.StringIO(),
        True,
        None,
        100,
    )
    console.print(shown)
    return console.file.getvalue()


def test_verdicts_of_the_last_round_are_reported_before_tasks_of_the_next() -> None:
    people = {"c1": "ann"}
    before = Snapshot(1, "collecting", None, {1: TaskProgress("ann", "")}, people)
    now = Snapshot(
        2,
        "collecting",
        None,
        {1: TaskProgress("ann", "", "fetch", 0, 521_008)},
        people,
        1,
        {"u1": (1, "c1", "merged", ""), "u2": (2, "c1", "admitted", "")},
        {1: (1, 1.25, "held-out")},
    )
    assert [event.text for event in changes(before, now)] == [
        "round 1: ann merged",
        "version 1 (round 1): loss 1.2500, held-out",
        "round 2: ann: fetch 0 B of 521.0 kB",
        "round 2: ann admitted",
    ]


def test_progress_without_a_total_is_its_phase_alone() -> None:
    assert TaskProgress("ann", "", "fetch").text == "fetch"


@pytest.mark.parametrize("terminals", [(True, True), (True, False), (False, True)])
def test_lines_go_above_the_region_only_where_both_are_on_one_terminal(
    monkeypatch: pytest.MonkeyPatch, terminals: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(out, "_force_terminal", terminals[0])
    monkeypatch.setattr(err, "_force_terminal", terminals[1])
    assert live.line_console() is (err if all(terminals) else out)
