"""A demo or a suite that is killed leaves no process behind, however deep it was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.wait import SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]

DEMO = """
import sys, time
from pathlib import Path
from demo.community import joiners, make_hub, write_data
from demo.processes import run_federation
folder = Path(sys.argv[1])
make_hub(folder / "hub")
write_data(folder)
run_federation(folder, joiners(folder), lambda event: None)
"""

GRANDCHILDREN = """
import subprocess, sys, time
from demo.end_together import end_together
end_together()
end_together()
inner = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
time.sleep(600)
"""

SUITE = """
import time
from tests.support.hub import HubProcess
from tests.support.wait import SECONDS

def test_that_is_killed(tmp_path):
    HubProcess(tmp_path / "hub").start()
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_child_started_ends_with_the_parent(ending: signal.Signals) -> None:
    assert_all_end(start("-c", GRANDCHILDREN), {"python": 1, "sleep": 1}, ending)


@pytest.mark.slow  # a demo's processes; the suite's own are tried beside it
def test_a_killed_demo_leaves_neither_hub_nor_contributors(tmp_path: Path) -> None:
    parent = start("-c", DEMO, str(tmp_path))
    assert_all_end(parent, {"gym-server": 1, "gym-client": 3, "python": 1}, signal.SIGKILL)


@pytest.mark.slow  # a suite within the suite; ends of processes are tried in tests of their own
def test_a_killed_suite_leaves_no_hub(tmp_path: Path) -> None:
    file = REPOSITORY / "tests" / "integration" / f"test_killed_{os.getpid()}.py"
    file.write_text(SUITE)
    try:
        parent = start(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "t"), str(file)
        )
        assert_all_end(parent, {"python": 3}, signal.SIGKILL, logs=tmp_path / "t")
    finally:
        file.unlink()


def start(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL
    )


def assert_all_end(
    parent: subprocess.Popen[bytes], wanted: dict[str, int], ending: signal.Signals, logs: Path | None = None
) -> None:
    """Wait until ``parent`` has the descendants that are wanted, by name; end it, and wait for them to be gone."""
    try:
        found: list[psutil.Process] = []
        while not _are_there(found, wanted, logs):
            assert parent.poll() is None, "it ended before its children were there"
            time.sleep(0.1)
            found = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(ending)
        parent.wait()
        gone, left = psutil.wait_procs(found, timeout=SECONDS)
        assert not left, [process.cmdline() for process in left]
        assert len(gone) >= sum(wanted.values())
    finally:
        parent.kill()
        parent.wait()


def _are_there(found: list[psutil.Process], wanted: dict[str, int], logs: Path | None) -> bool:
    if logs is not None and not list(logs.glob("**/hub/stderr.log")):
        return False
    names = []
    for process in found:
        try:
            names.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return all(sum(name in line for line in names) >= count for name, count in wanted.items())
