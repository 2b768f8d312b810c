"""Communication between the processes of a run; with a single process, nothing is sent.

torchrun (and ``gym train --nproc``) sets ``RANK`` and ``WORLD_SIZE`` in each process's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gym_fed.config.train.compute import DistributedSettings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.training.processes import peers
from gym_fed.training.processes.ranks import is_main, world_size

__all__ = [
    "agreed",
    "count",
    "in_steps",
    "is_main",
    "on_main",
    "refuse_lost_process",
    "require_all",
    "start",
    "world_size",
]

T = TypeVar("T")
_STEP_SECONDS = 5.0


def start(settings: DistributedSettings, device: torch.device) -> None:
    """Join the other processes. Later calls, and calls in a single process, return immediately.

    Raises:
        GymError: ``UNAVAILABLE`` if the other processes do not join in time.
    """
    if world_size() == 1 or dist.is_initialized():
        return
    backend = settings.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=settings.timeout_seconds)
    peers.watch()
    try:
        if settings.strategy == "deepspeed":
            if device.type == "cpu":  # the variable is read when deepspeed is first imported
                os.environ.setdefault("DS_ACCELERATOR", "cpu")
            import deepspeed

            with redirect_stdout(sys.stderr):  # it logs the kernels that it builds on first use
                deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        reason = f"the other {counted(world_size() - 1, 'process')} of this run cannot be reached: {error}"
        remedy = "start all of them, with the same --rdzv-endpoint"
        raise GymError(ErrorCode.UNAVAILABLE, reason, remedy) from error


@contextmanager
def refuse_lost_process() -> Iterator[None]:
    """Convert the error of a collective whose connection broke, because another process has ended.

    Raises:
        GymError: ``UNAVAILABLE`` for such an error.
    """
    try:
        yield
    except RuntimeError as error:
        # NCCL and the store raise DistError; gloo raises a RuntimeError that contains the name of its source file.
        lost = isinstance(error, dist.DistError) or "/gloo/" in str(error)
        if world_size() == 1 or not lost:
            raise
        reason = "another process of this run has ended, or its machine cannot be reached"
        remedy = "see that process's output; to resume, run the same command again on every machine"
        raise GymError(ErrorCode.UNAVAILABLE, reason, remedy) from error


def count() -> int:
    """Return the number of processes that take part in a collective."""
    if not dist.is_initialized():
        return 1
    number = torch.ones(1, dtype=torch.int64, device=_device())
    dist.all_reduce(number)
    return int(number.item())


def require_all(number: int) -> None:
    """Refuse to train if the library sees a different number of processes, since N separate models would be trained."""
    if number != world_size():
        reason = f"{counted(world_size(), 'process', 'were')} started, but the training library sees {number}"
        remedy = "check the environment variables RANK, WORLD_SIZE and MASTER_ADDR"
        raise GymError(ErrorCode.INTERNAL, reason, remedy)


def on_main(work: Callable[[], T]) -> T:
    """Run ``work`` only in the main process. All processes get its result (a JSON value) or its error.

    Raises:
        GymError: The error of ``work``, in every process.
    """
    if not dist.is_initialized():
        return work()
    outcome: dict[str, Any] = {}
    if is_main():
        try:
            outcome = {"value": work()}
        except GymError as error:
            outcome = {"error": [error.code.value, error.message, error.hint]}
    outcome = json.loads(_broadcast(json.dumps(outcome).encode()))
    if "error" in outcome:
        code, message, hint = outcome["error"]
        raise GymError(ErrorCode(code), message, hint)
    value: T = outcome["value"]
    return value


def in_steps(work: Callable[[], Iterator[object]]) -> None:
    """Exhaust an iterator in the main process, in steps of a few seconds, so that no other process times out.

    Raises:
        GymError: The error of ``work``, in every process.
    """
    iterator: Iterator[object] | None = None

    def advance() -> bool:
        nonlocal iterator
        iterator = work() if iterator is None else iterator
        deadline = time.monotonic() + _STEP_SECONDS
        return all(time.monotonic() < deadline for _ in iterator)

    while not on_main(advance):
        pass


def agreed(should_stop: Callable[[], bool] | None) -> Callable[[], bool]:
    """Return a function that is True if ``should_stop`` is True in any process, so that all stop at the same step."""

    def any_should_stop() -> bool:
        own = should_stop is not None and should_stop()
        if not dist.is_initialized():
            return own
        flag = torch.tensor([int(own)], device=_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    return any_should_stop


def _broadcast(message: bytes) -> bytes:
    """Send the main process's bytes to every process."""
    size = torch.tensor([len(message)], device=_device())
    dist.broadcast(size, src=0)
    # The other processes pass an empty message, and receive into a buffer of the same size as the main process's.
    buffer = torch.zeros(int(size.item()), dtype=torch.uint8)
    if is_main():
        buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    buffer = buffer.to(_device())
    dist.broadcast(buffer, src=0)
    return bytes(buffer.cpu().numpy())


def _device() -> torch.device:
    """Return the device for collectives: NCCL works only on GPUs."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
