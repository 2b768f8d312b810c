"""Native code that finds no memory raises, on whichever of its threads that is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gym_quant.kernels import dispatch

SCRIPT = """
import re, resource, sys
from pathlib import Path
import torch
from gym_quant.kernels import native

path, threads, room, rows, cols = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 8, (1 << 22) + 1
torch.set_num_threads(threads)
x = torch.zeros(rows, cols)
made = torch.empty(rows, -(-cols // 32), 128, dtype=torch.uint8), torch.empty(rows, -(-cols // 1024)), torch.empty(rows)
def tables(columns):
    native.call("gq_lookup_tables", path, 0, x.data_ptr(), rows, columns, None, *(part.data_ptr() for part in made))
tables(33)  # the threads are there
size = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_AS, (size + (room << 20),) * 2)
try:
    tables(cols)  # a thread's padded row takes 16 MiB
except MemoryError as error:
    print(error)
tables(33)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is Linux's")
@pytest.mark.skipif(dispatch.path() == "torch", reason="torch computes")
@pytest.mark.parametrize(("threads", "room"), [(1, 8), (2, 24)])
def test_a_thread_without_memory_for_its_work_space_ends_the_call_and_not_the_process(
    threads: int, room: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, dispatch.path(), str(threads), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    if room < 16 or found:  # else one thread has room, and may be faster than the other starts
        assert found == ["gq_lookup_tables: no memory for its workspace"]
