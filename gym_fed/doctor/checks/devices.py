"""Check the devices of this machine: CUDA, MPS, CPU cores, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from gym_fed.core.text import counted
from gym_fed.doctor.check import Check, Finding, Level

GIB = 1 << 30
# A 135M model with its optimiser state takes about this much; less means that training will be killed.
MIN_MEMORY_BYTES = 2 * GIB
GROUPS = Path("/sys/fs/cgroup")
"""Mount point of this process's cgroups."""


class Devices(Check):
    """Check accelerators, CPU cores and memory."""

    def findings(self) -> Iterator[Finding]:
        yield from accelerators()
        yield from processor()
        yield from memory()


def accelerators() -> Iterator[Finding]:
    """List CUDA devices with name and memory, and Apple's MPS."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("device: torch", Level.FAIL, f"torch cannot be imported: {error}", "make install")
        return
    build = f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            text = f"{device.name}, {device.total_memory / GIB:.1f} GiB"
            yield Finding(f"device: cuda:{index}", Level.OK, text)
    else:
        yield Finding("device: cuda", Level.OK, f"none; work runs on the processor ({build})")
    usable = torch.backends.mps.is_available()
    yield Finding("device: mps", Level.OK, "usable" if usable else "none")


def processor() -> Iterator[Finding]:
    """Report the CPU cores that this process may use, and their total."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    yield Finding("device: cpu", Level.OK, f"{usable} of {counted(total, 'core')} usable")


def memory() -> Iterator[Finding]:
    """Report the available memory, within the container's limit."""
    yield judge_memory(total_memory_bytes(), available_memory_bytes())


def judge_memory(total_bytes: int, available_bytes: int) -> Finding:
    """Convert the two figures to a finding."""
    seen = f"{available_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free"
    if available_bytes >= MIN_MEMORY_BYTES:
        return Finding("device: memory", Level.OK, seen)
    remedy = f"close other programs: training needs {MIN_MEMORY_BYTES / GIB:.0f} GiB even for a small model"
    return Finding("device: memory", Level.WARN, seen, remedy)


def total_memory_bytes() -> int:
    """Return the physical memory, or the cgroup's limit if lower."""
    physical = int(psutil.virtual_memory().total)
    return min([physical, *(limit for limit, _ in _limits())])


def available_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping, within the cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(max(0, limit - used) for limit, used in _limits())])


def _limits() -> list[tuple[int, int]]:
    """Return the limit and usage of the cgroup, v2 or v1; a container sees its own.

    Inactive file cache counts as free, since the kernel drops it on allocation.
    """
    names = (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    )
    limits = []
    for limit, used, stat in names:
        if (limit_bytes := _read_number(GROUPS / limit)) is not None:
            limits.append((limit_bytes, (_read_number(GROUPS / used) or 0) - _idle_file_bytes(GROUPS / stat)))
    return limits


def _idle_file_bytes(stat: Path) -> int:
    lines = stat.read_text(encoding="ascii").splitlines() if stat.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _read_number(file: Path) -> int | None:
    text = file.read_text(encoding="ascii").strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
