"""What can this machine compute on: CUDA, MPS, processor cores, memory?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gym_fed.doctor.check import Check, Finding, Level

GIB = 1 << 30
# A 135M model with its optimiser state takes about this much; less means that training will be killed.
LEAST_MEMORY_BYTES = 2 * GIB


class Devices(Check):
    """Accelerators, processor cores, memory."""

    def findings(self) -> Iterator[Finding]:
        yield from accelerators()
        yield from processor()
        yield from memory()


def accelerators() -> Iterator[Finding]:
    """CUDA devices by name and memory, and Apple's MPS."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("device: torch", Level.FAIL, f"torch cannot be imported: {error}", "make install")
        return
    build = f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Finding(
                f"device: cuda:{index}", Level.OK, f"{device.name}, {device.total_memory / GIB:.1f} GiB"
            )
    else:
        yield Finding("device: cuda", Level.OK, f"none; work runs on the processor ({build})")
    usable = torch.backends.mps.is_available()
    yield Finding("device: mps", Level.OK, "usable" if usable else "none")


def processor() -> Iterator[Finding]:
    """Cores this process may use, of those there are."""
    there = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    yield Finding("device: cpu", Level.OK, f"{usable} of {there} cores usable")


def memory() -> Iterator[Finding]:
    """Memory that can still be had, the container's limit considered."""
    yield judge_memory(total_memory_bytes(), available_memory_bytes())


def judge_memory(total_bytes: int | None, available_bytes: int | None) -> Finding:
    """Turn the two figures, ``None`` where the system does not report it, into a finding."""
    if total_bytes is None:
        return Finding("device: memory", Level.OK, "this system does not report how much there is")
    if available_bytes is None:
        return Finding("device: memory", Level.OK, f"{total_bytes / GIB:.1f} GiB, free part unknown")
    seen = f"{available_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free"
    if available_bytes >= LEAST_MEMORY_BYTES:
        return Finding("device: memory", Level.OK, seen)
    remedy = f"close other programs: training needs {LEAST_MEMORY_BYTES / GIB:.0f} GiB even for a small model"
    return Finding("device: memory", Level.WARN, seen, remedy)


def total_memory_bytes() -> int | None:
    """Physical memory, or the control group's limit where that is less; ``None`` where nothing reports it."""
    if not hasattr(os, "sysconf"):
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    return physical if limit is None else min(physical, limit)


def available_memory_bytes() -> int | None:
    """What can be allocated without swapping (Linux: ``MemAvailable``), ``None`` where nothing reports it."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return None
    fields = dict(line.split(":", 1) for line in file.read_text(encoding="ascii").splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    used = _read_number(Path("/sys/fs/cgroup/memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _read_number(file: Path) -> int | None:
    text = file.read_text(encoding="ascii").strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
