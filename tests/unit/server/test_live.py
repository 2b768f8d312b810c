"""What the coordinator's terminal says while a hub runs: changes once each, bounded, with names made harmless."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gym_server.cli import live
from gym_server.cli.live import MAX_SHOWN, HubEvent, Watcher, changes, region
from gym_server.cli.show import status_of, status_table
from gym_server.cli.snapshot import Snapshot, TaskProgress, VersionLoss, read_snapshot
from gym_server.federation import Federation
from gym_server.store.tables import accounts, messages, nodes, round_tasks, rounds, updates, versions
from gym_server.store.unavailable import StoreUnavailable
from sqlalchemy.exc import OperationalError

from gym_fed.core.console import TextConsole, err, out
from gym_fed.core.errors import ErrorCode, GymError
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
    before = read_snapshot(fed.state, fed.config, fed.lease_histories)

    def news() -> list[str]:
        nonlocal before
        now = read_snapshot(fed.state, fed.config, fed.lease_histories)
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
    assert "round 1 (0 of 10 committed) collecting: 0 of 3 updates, " in shown
    assert " s left" in shown
    assert re.search(r"ann +train 30/50 +60 %", shown)
    assert "not started" in shown
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
    assert read_snapshot(fed.state, fed.config, fed.lease_histories).losses == {
        1: VersionLoss(1, 0.5, "held-out")
    }


def test_a_thousand_that_join_at_once_are_a_few_lines(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Snapshot(members={f"c{n}": f"n{n}" for n in range(1000)})
    monkeypatch.setattr(live, "read_snapshot", lambda *_: crowd)
    events: list[HubEvent] = []
    Watcher(fed.state, fed.config, fed.lease_histories, events.append, None)._step(Snapshot())
    assert len(events) == live._MAX_LINES + 1
    assert events[-1].text == f"and {1000 - live._MAX_LINES} more changes"
    many = Snapshot(1, "collecting", None, {n: TaskProgress(f"n{n}", "") for n in range(1000)})
    assert len(rendered(region(many)).splitlines()) == MAX_SHOWN + 3


def test_the_watcher_reports_while_its_block_runs_and_leaves_the_database_alone(fed: Federation) -> None:
    events: list[HubEvent] = []
    console = TextConsole()
    console.file, console._force_terminal, console.width = io.StringIO(), True, 100
    with Watcher(fed.state, fed.config, fed.lease_histories, events.append, console):
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
    with Watcher(fed.state, fed.config, fed.lease_histories, events.append, None):
        enrol(fed, 1, "ann")
        late.set()
    assert [event.kind for event in events] == ["joined"]


def test_the_watcher_outlives_a_database_that_is_away_and_the_log_says_so_once(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[HubEvent] = []
    tries: list[int] = []

    def away(*_: object) -> Snapshot:
        tries.append(1)
        if len(tries) == 3:
            raise OperationalError("SELECT 1", {}, Exception("locked"))
        raise StoreUnavailable(GymError(ErrorCode.UNAVAILABLE, "postgresql://hub@host/db: gone"))

    monkeypatch.setattr(live, "_POLL_SECONDS", 0.01)
    with Watcher(fed.state, fed.config, fed.lease_histories, events.append, None):
        with monkeypatch.context() as patch:
            patch.setattr(live, "read_snapshot", away)
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


def test_the_region_shows_losses_of_the_last_versions_and_how_to_join_within_80_columns() -> None:
    tasks = {
        1: TaskProgress("a contributor with a name of some length", "", "upload", 12_345_678, 123_456_789),
        2: TaskProgress("bob", "replied", "train", 50, 50),
    }
    losses = {
        height: VersionLoss(height, 4 - height / 4, "median of 3, self-reported") for height in range(1, 9)
    }
    now = Snapshot(
        9,
        "collecting",
        time.time() + 1799.9,
        tasks,
        connected=2,
        verdicts={
            "u1": (9, "c1", "admitted", ""),
            "u2": (9, "c2", "refused", ""),
            "u3": (8, "c1", "merged", ""),
        },
        losses=losses,
        committed=8,
        num_rounds=10,
        quorum=3,
    )
    footer = ["invite a friend: gym-server invites create --dir hub", "dashboard: http://127.0.0.1:9444"]
    shown = rendered(region(now, footer), width=80)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "..." not in shown.replace("a contributor with a ...", "")
    assert "round 9 (8 of 10 committed) collecting: 1 of 3 updates, 1800 s left" in shown
    assert "loss of versions 3 to 8: 3.2500 3.0000 2.7500 2.5000 2.2500 2.0000" in shown
    assert "9 %" in shown
    assert "100 %" not in shown, "who has replied is done"
    assert shown.splitlines()[-2:] == [f"  {line}" for line in footer]


def test_an_aborted_round_is_shown_with_its_reason() -> None:
    now = Snapshot(2, "aborted", num_rounds=10, quorum=3, reason="1 of 3 updates\x1b[2J")
    assert rendered(region(now)).startswith("round 2 (0 of 10 committed) aborted: 1 of 3 updates\\x1b[2J")


def test_losses_that_are_known_are_not_worked_out_again_unless_the_version_is_another(
    fed: Federation,
) -> None:
    with fed.database.transaction() as tx:
        tx.execute(versions.insert().values(**version(), heldout_after=0.5))
    known = Snapshot(losses={1: VersionLoss(1, 9.0, "held-out")})
    assert read_snapshot(fed.state, fed.config, fed.lease_histories, known).losses == known.losses
    other = Snapshot(losses={1: VersionLoss(7, 9.0, "held-out")})
    assert read_snapshot(fed.state, fed.config, fed.lease_histories, other).losses == {
        1: VersionLoss(1, 0.5, "held-out")
    }


def test_after_a_rollback_the_terminal_counts_and_shows_only_what_leads_to_the_current_version(
    fed: Federation,
) -> None:
    with fed.database.transaction() as tx:
        for height, parent in ((1, 0), (2, 1), (3, 2)):
            own = {"height": height, "server_round": height, "digest": f"d{height}", "parent": parent}
            tx.execute(versions.insert().values(**{**version(), **own}, heldout_after=float(height)))
    before = read_snapshot(fed.state, fed.config, fed.lease_histories)
    assert (before.version, before.committed) == (3, 3)
    fed.steering.rollback(1, "")
    now = read_snapshot(fed.state, fed.config, fed.lease_histories, before)
    assert [event.text for event in changes(before, now)] == [
        "version 1 is the current one again; the next round starts from it"
    ]
    assert (now.committed, now.losses) == (1, {1: VersionLoss(1, 1.0, "held-out")})
    assert "(1 of 10 committed)" in str(
        status_table(status_of(fed.state, fed.config, fed.steering, fed.payouts, fed.fingerprint)).title
    )
    with fed.database.transaction() as tx:
        for height, parent in ((4, 1), (5, 4)):
            own = {"height": height, "server_round": height, "digest": f"d{height}", "parent": parent}
            tx.execute(versions.insert().values(**{**version(), **own}, heldout_after=float(height)))
    after = read_snapshot(fed.state, fed.config, fed.lease_histories, now)
    assert [event.kind for event in changes(now, after)] == ["version", "version"]
    assert after.committed == 3
    assert "loss of versions 1, 4 to 5: 1.0000 4.0000 5.0000" in rendered(region(after))


def test_a_round_that_is_over_awaits_nobody() -> None:
    tasks = {1: TaskProgress("ann", "", "fetch")}
    assert "1 asked, 1 awaited" in rendered(region(Snapshot(1, "collecting", None, tasks)))
    assert "1 asked, 0 awaited" in rendered(region(Snapshot(1, "aborted", None, tasks)))


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


def rendered(shown: Any, width: int = 100) -> str:
    console = TextConsole()
    console.file, console._force_terminal, console._color_system, console.width = (
        io.StringIO(),
        True,
        None,
        width,
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
        {1: VersionLoss(1, 3.5592, "held-out", 5.2871)},
    )
    assert [event.text for event in changes(before, now)] == [
        "round 1: ann merged",
        "version 1 (round 1): held-out 5.287 -> 3.559",
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
