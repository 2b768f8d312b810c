"""A server of gym-nano with ``engine: vllm`` over the fake vLLM, and what that vLLM was asked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.setup import Serving, open_serving

FAKE = Path(__file__).parent / "fake_vllm"


def fake_python(folder: Path) -> Path:
    """An interpreter that finds the fake vLLM, as the one of vLLM's environment finds the real one."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nFAKE_VLLM_LOG="{folder}/asked.jsonl" PYTHONPATH="$PYTHONPATH:{FAKE}" '
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o700)
    return python


def asked(folder: Path, kind: str) -> list[Any]:
    """What the fake vLLM logged of a kind: ``start``, ``body``, ``running`` or ``ended``."""
    file = folder / "asked.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [value[kind] for value in map(json.loads, lines) if kind in value]


@contextmanager
def vllm_serving(folder: Path, **more: Any) -> Iterator[Serving]:
    """A server of gym-nano."""
    engine = {"kind": "vllm", **more.pop("engine", {})}
    vllm = {"python": fake_python(folder), "start_seconds": 240, **more.pop("vllm", {})}
    with open_serving(ServingConfig(base="gym-nano", engine=engine, vllm=vllm, **more)) as serving:
        yield serving


def is_alive(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
