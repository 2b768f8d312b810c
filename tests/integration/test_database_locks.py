"""The hub keeps SQLite's locks, so that a command beside it neither misses nor deletes what it acknowledged."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.support.contributor import RawContributor
from tests.support.hub import HubProcess


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
