"""The heaps of glibc that a hub's threads share."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

from gym_fed.core.portable import limit_heaps

THREADS = """
import ctypes, sys, threading
from gym_fed.core.portable import limit_heaps

if sys.argv[1] == "limited":
    limit_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fdopen.restype = ctypes.c_void_p, ctypes.c_void_p
together = threading.Barrier(12)

def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for one in threads:
    one.start()
for one in threads:
    one.join()
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def num_heaps(word: str) -> int:
    done = subprocess.run([sys.executable, "-c", THREADS, word], capture_output=True, text=True, check=True)
    return len(re.findall("<heap nr=", done.stdout))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has several heaps")
def test_threads_share_two_heaps() -> None:
    assert num_heaps("free") > 2
    assert num_heaps("limited") == 2


def test_a_system_without_the_setting_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("the C library was called"))
    limit_heaps()
