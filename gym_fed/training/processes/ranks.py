"""This process's rank, from torchrun's environment variables, and ``gym train --nproc N``, which starts N processes.

Imports no torch until processes are started.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError

_SECONDS_FOR_A_CHECKPOINT = 600
_SHOWN_LINES = 20


def world_size() -> int:
    """Return the number of processes that share the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return True if this is the main process, which writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Run ``gym ARGUMENTS`` in ``nproc`` processes of this machine and wait for them.

    Process 0 writes to the terminal; the output of another process is shown only if it fails first. Ctrl-C or SIGTERM
    is sent to each process once, with time for a checkpoint.

    Args:
        arguments: The command line after ``gym``, without ``--nproc``.
        nproc: Number of processes, at least 2.

    Returns:
        The exit code of the first process that failed, 128 + N after signal N, or 0.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Otherwise every process would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    with tempfile.TemporaryDirectory(prefix="gym-train-") as folder:
        quiet = {rank: Std.ALL for rank in range(1, nproc)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="gym-train",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            shutdown_timeout=_SECONDS_FOR_A_CHECKPOINT,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=quiet),
        )
        command = [*module_command("gym_fed.cli.main", *arguments)[1:]]
        try:
            elastic_launch(config, sys.executable)(*command)
        except SignalException as stopped:
            return 128 + stopped.sigval
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            if rank != 0:
                _print_log_end(Path(folder), rank)
            return _exit_code(failure.exitcode, rank)
    return 0


def _exit_code(status: int, rank: int) -> int:
    """Return the exit code, or raise an error if a signal ended the process."""
    if status >= 0:
        return status
    reason = f"process {rank} was ended by signal {-status}"
    remedy = "on a machine short of memory that is the system's doing: use smaller batches or fewer processes"
    raise GymError(ErrorCode.INTERNAL, reason, remedy)


def _print_log_end(folder: Path, rank: int) -> None:
    """Print the last log lines of a process without a terminal."""
    for file in sorted(folder.rglob(f"{rank}/stderr.log")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        sys.stderr.write("".join(f"[process {rank}] {line}\n" for line in lines))
