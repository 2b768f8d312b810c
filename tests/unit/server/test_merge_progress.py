"""The progress of a merge on the terminal, in JSON and on the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gym_server.cli.live import changes, region
from gym_server.cli.show import rounds_of, status_of, status_table
from gym_server.cli.snapshot import Snapshot, VersionLoss, read_snapshot
from gym_server.rounds.merge_progress import MergeProgress, merge_state
from gym_server.store.database import Database
from gym_server.strategy.durable import DurableDeltaSoup
from gym_server.web.home import snapshot

from tests.support.paced_room import Member, PacedRoom


def test_each_phase_of_a_merge_is_on_the_terminal_in_json_and_on_the_dashboard(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"text": "the cat sat on the mat"}\n{"text": "the dog sat on the log"}\n')
    room = PacedRoom(
        tmp_path / "hub",
        tiny_base,
        [Member(f"fast{i}", 20) for i in range(3)],
        rounds={"num_rounds": 9, "min_contributors": 3},
        gate={"heldout": str(heldout), "format": "text", "screen_updates": True, "max_loss_increase": 9},
    )
    seen: list[tuple[str, str, Any, Any]] = []
    events: list[str] = []
    before = read_snapshot(room.fed.state, room.fed.config, room.fed.lease_histories)
    write = MergeProgress._write

    def observed(progress: MergeProgress) -> None:
        nonlocal before
        write(progress)
        now = read_snapshot(room.fed.state, room.fed.config, room.fed.lease_histories)
        events.extend(event.text for event in changes(before, now) if event.kind == "merging")
        before = now
        status, page = (
            status_of(
                room.fed.state, room.fed.config, room.fed.steering, room.fed.payouts, room.fed.fingerprint
            ),
            snapshot(room.fed.state, room.fed.config, room.fed.lease_histories),
        )
        assert (
            status["merge"]
            == page["merge"]
            == rounds_of(room.fed.database, room.fed.round_store)[-1]["merge"]
        )
        assert now.merge in str(status_table(status).title)
        assert f"merging: {now.merge}" in str(region(now))
        seen.append((status["merge"]["phase"], now.merge, status["merge"]["done"], status["merge"]["total"]))

    monkeypatch.setattr(MergeProgress, "_write", observed)
    monkeypatch.setattr("gym_server.rounds.merge_progress._WRITE_SECONDS", 0.0)
    try:
        (ended,) = room.run(1)
        assert ended.reason == ""
        phases = list(dict.fromkeys(phase for phase, *_ in seen))
        assert phases == [
            "reading updates",
            "running checks",
            "checking updates",
            "merging tensors",
            "writing the server's state",
            "checking the held-out loss",
            "evaluating",
            "writing the soup",
            "scoring updates",
        ]
        texts = [text for _, text, *_ in seen]
        assert "reading updates, 3 of 3" in texts
        assert "checking updates, 2 of 3" in texts
        merged = [(done, total) for phase, _, done, total in seen if phase == "merging tensors"]
        assert merged[-1][0] == merged[-1][1] > 3
        assert events.count("round 1: merging: reading updates, 0 of 3") == 1
        assert len(events) == len(phases) + 1, (
            "other checks run before and after the held-out loss is checked"
        )
        over = read_snapshot(room.fed.state, room.fed.config, room.fed.lease_histories)
        assert over.merge == ""
        assert (
            status_of(
                room.fed.state, room.fed.config, room.fed.steering, room.fed.payouts, room.fed.fingerprint
            )["merge"]
            is snapshot(room.fed.state, room.fed.config, room.fed.lease_histories)["merge"]
            is None
        )
        assert over.losses[0] == VersionLoss(0, pytest.approx(over.losses[0].loss), "held-out")
        assert over.losses[1].before == over.losses[0].loss
        assert "loss of versions 0 to 1: " in str(region(over))
    finally:
        room.close()


def test_steps_are_written_twice_a_second_at_most(tmp_path: Path) -> None:
    database = Database.open("sqlite:///hub.db", tmp_path)
    seconds = 0.0
    progress = MergeProgress(database, lambda: seconds)
    progress.begin("merging tensors", 100)
    counts = []
    for _ in range(10):
        seconds += 0.125
        progress.step("w")
        with database.reading() as tx:
            counts.append((merge_state(tx) or {})["done"])
    progress.end()
    with database.reading() as tx:
        assert merge_state(tx) is None
    database.close()
    assert counts == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8]


def test_a_round_that_does_not_merge_has_no_phase_though_a_killed_hub_left_one(
    tmp_path: Path, tiny_base: Path
) -> None:
    room = PacedRoom(tmp_path / "hub", tiny_base, [Member("fast", 20)])
    try:
        MergeProgress(room.fed.database).begin("running checks", 3)
        DurableDeltaSoup(room.fed)._collecting(1)
        assert (
            read_snapshot(room.fed.state, room.fed.config, room.fed.lease_histories).merge == Snapshot().merge
        )
        assert (
            status_of(
                room.fed.state, room.fed.config, room.fed.steering, room.fed.payouts, room.fed.fingerprint
            )["merge"]
            is None
        )
    finally:
        room.close()
