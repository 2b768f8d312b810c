"""The hub keeps SQLite's locks, so that a command beside it neither misses nor deletes what it acknowledged."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor
from tests.support.hub import HubProcess
from tests.support.loopback_hub import LoopbackHub


def test_commands_beside_a_hub_see_all_that_it_acknowledged_and_so_does_the_hub_after_a_kill(
    tmp_path: Path, tiny_base: Path
) -> None:
    config = {"rounds": {"min_contributors": 1}, "soup": {"aggregator": "mean", "num_malicious_nodes": 0}}
    hub = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    try:
        for count in (1, 2, 3):
            one = RawContributor(hub.address, f"c{count}").enrol()
            one.close()
            assert len(hub.ask("status")["contributors"]) == count
            # Commands come and go: the last one to close a database deletes its log, unless the hub holds a lock.
            assert not [name for name in open_files(hub) if "hub.db" in name and "(deleted)" in name]
        hub.kill()
        assert len(hub.ask("status")["contributors"]) == 3
    finally:
        if hub.process is not None:
            hub.process.kill()


def open_files(hub: HubProcess) -> list[str]:
    found = []
    for file in Path(f"/proc/{hub.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(str(file.readlink()))
    return found


def test_a_hub_waits_for_a_tool_that_locks_its_database_and_takes_the_call_then(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    one = RawContributor(hub.address).enrol()
    tool = sqlite3.connect(tmp_path / "hub" / "hub.db", isolation_level=None, check_same_thread=False)
    tool.execute("BEGIN EXCLUSIVE")
    released = threading.Timer(1.5, tool.execute, ("ROLLBACK",))
    released.start()
    began = time.monotonic()
    try:
        state = one.call(one.stub.BeginUpload, pb.BeginUploadRequest(sha256="1" * 64, size_bytes=10))
        assert not state.complete
        assert time.monotonic() - began > 1
    finally:
        released.join()
        tool.close()
        one.close()
        hub.close()
