"""The demo's participants and data: three contributors, a malicious client, a held-out set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from demo.processes import REPOSITORY
from gym_fed.core.registries import TASKS
from gym_fed.data.generated import generate, generate_mix
from gym_fed.local_federation import BIN, Joiner, join_command

CONTRIBUTORS = {"ada": "shout", "ben": "size", "cleo": "initial"}
"""The contributors, each with the one task that it knows and the base does not."""
MALICIOUS = "mallory"
KNOWN = ("copy", "reverse", "sort", "upper")
"""Tasks of the base that the table shows one by one."""
EXAMPLES = 1000
REHEARSAL = 2000
"""Rows of the base's tasks in every contributor's data, which anybody can generate: learning a new task costs the old
ones less. Of 600, learned again and again, `sort` had half the loss of unseen rows in one run."""
BASE_TASKS = [name for name in TASKS.names() if TASKS.new(name).group == "base"]
HELDOUT_PER_TASK = 24


def write_data(folder: Path) -> None:
    """Every contributor's rows, and the coordinator's held-out set over all the tasks."""
    for name, task in {**CONTRIBUTORS, MALICIOUS: "shout"}.items():
        seed = sum(map(ord, name))
        rows = generate(task, EXAMPLES, seed=seed) + generate_mix(BASE_TASKS, REHEARSAL, seed=seed)
        _write_rows(folder / f"{name}.jsonl", rows)
    heldout = [
        row
        for task in (*CONTRIBUTORS.values(), *KNOWN)
        for row in generate(task, HELDOUT_PER_TASK, seed=7, split="heldout")
    ]
    _write_rows(folder / "hub" / "heldout.jsonl", heldout)


def make_hub(folder: Path) -> None:
    """`gym-server init`, then the demo's own config."""
    subprocess.run([BIN / "gym-server", "init", "--dir", folder], check=True, capture_output=True)
    (folder / "gym-server.yaml").write_text((REPOSITORY / "demo" / "hub.yaml").read_text())


def joiners(folder: Path) -> dict[str, Joiner]:
    """The commands of all four."""
    honest: dict[str, Joiner] = {
        name: lambda address, fingerprint, name=name: join_command(folder, name, address, fingerprint)  # type: ignore[misc]
        for name in CONTRIBUTORS
    }

    def malicious(address: str, fingerprint: str) -> list[str | Path]:
        return [
            sys.executable,
            "-m",
            "demo.malicious",
            folder / MALICIOUS,
            address,
            fingerprint,
            folder / f"{MALICIOUS}.jsonl",
        ]

    return {**honest, MALICIOUS: malicious}


def _write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
