"""Children of the pages: they end with their parent, and go last."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from gym_fed.core import child_process
from gym_fed.core.child_process import background_environment, put_last
from tests.support.wait import SECONDS, until

CHILD = """
import time
from gym_fed.core.child_process import leave_at_eof
leave_at_eof()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_child_ends_when_its_parent_closes_its_input(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.write(b"what is written does not end it\n")
    child.stdin.flush()
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(SECONDS) == -signal.SIGTERM


def test_a_child_that_is_put_last_has_a_low_priority_and_one_that_is_gone_is_ignored(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_LOW_PRIORITY", 10)  # 0 in the other tests
    put_last(child.pid)
    assert psutil.Process(child.pid).nice() == 10
    child.kill()
    until(lambda: child.poll() is not None)
    put_last(child.pid)


def test_the_environment_of_the_background_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    found = background_environment()
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"], found["HF_HUB_OFFLINE"]) == (
        "1",
        "",
        "1",
    )
