"""Wrapper process of a job: runs its command and records the exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from gym_fed.core.child_process import module_command
from gym_fed.core.files import write_atomically


def main(folder: Path, module: str, words: list[str]) -> None:
    """Run ``python -m MODULE WORDS`` once the workbench has written ``job.json``; do nothing if it has not.

    Signals go to the whole group: the command handles them, and this process stays to write the status.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, a handler is not inherited by the command
    sys.stdin.buffer.read()
    if not (folder / "job.json").exists():
        return
    with (folder / "output.txt").open("ab", buffering=0) as output:
        ended = subprocess.run(
            module_command(module, *words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    status = {"exit_code": ended.returncode, "ended_at": time.time()}
    write_atomically(folder / "status.json", json.dumps(status).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
