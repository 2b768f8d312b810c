"""Resolve every extra of pyproject.toml under constraints.txt, without installing it.

    python .ci/check_extras.py [EXTRA...]

An extra fails when pip finds no set of versions, when it would bring a package that constraints.txt does not pin, or
another torch, or NVIDIA's libraries. Run it with the Python of an environment that has the project: pip then looks at
what is missing there, and torch is not fetched again. The project's own requirements are pinned, so a set of versions
that keeps to the pins suits them too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 4
UNPINNED = {"triton"}
"""Each build of torch for CUDA has a version of its own, so a pin would suit one of them only."""
PURE_PYTHON = {"nvidia-ml-py"}
"""Named like NVIDIA's libraries, but a few kilobytes of ctypes around the one of the driver."""
SECONDS = 240
"""An extra that takes longer is one whose versions pip tries one by one."""


def main() -> None:
    """Resolve the extras that are named, or all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    wanted = sys.argv[1:] or [name for name in extras if name != "dev"]  # make install has resolved dev
    pins = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda name: resolved(extras[name], pins), wanted)
        problems = []
        for name, (seconds, brought, wrong) in zip(wanted, found, strict=True):
            print(f"{name}: {seconds:.0f} s: {', '.join(brought) or 'nothing is missing'}", flush=True)
            problems += [f"extra {name!r}: {problem}" for problem in wrong]
    print(f"{len(wanted)} extras in {time.monotonic() - began:.0f} s")
    if problems:
        sys.exit("\n".join(problems))


def resolved(requirements: list[str], pins: dict[str, str]) -> tuple[float, list[str], list[str]]:
    """Seconds, what pip would install, and what is wrong with it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--dry-run", "-q"]
        command += ["-c", str(ROOT / "constraints.txt"), "--report", str(report), *requirements]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment())
        except subprocess.TimeoutExpired:
            return SECONDS, [], [f"is not resolved in {SECONDS} s"]
        seconds = time.monotonic() - began
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line and not line.startswith("WARNING")]
            return seconds, [], ["cannot be resolved: " + " ".join(lines)[-1500:]]
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    brought = {normal(item["metadata"]["name"]): str(item["metadata"]["version"]) for item in items}
    return seconds, [f"{name} {version}" for name, version in sorted(brought.items())], wrong(brought, pins)


def wrong(brought: dict[str, str], pins: dict[str, str]) -> list[str]:
    """What must not be in an installation of an extra."""
    found = []
    for name, version in sorted(brought.items()):
        if name in UNPINNED:
            continue
        if (name not in PURE_PYTHON and name.startswith(("nvidia-", "cuda-"))) or name == "torch":
            found.append(f"brings {name} {version}, though torch is there")
        elif name not in pins:
            found.append(f"brings {name} {version}, which constraints.txt does not pin")
        elif pins[name] != version.partition("+")[0]:
            found.append(f"brings {name} {version}, but constraints.txt pins {pins[name]}")
    return found


def pinned(text: str) -> dict[str, str]:
    """Version of every package in constraints.txt."""
    rows = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {normal(name): version for name, _, version in (row.partition("==") for row in rows if row)}


def normal(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def environment() -> dict[str, str]:
    """Constraints reach isolated builds by these variables only; pip 25.3 renamed the first to the second."""
    file = str(ROOT / "constraints.txt")
    return {**os.environ, "PIP_CONSTRAINT": file, "PIP_BUILD_CONSTRAINT": file}


if __name__ == "__main__":
    main()
