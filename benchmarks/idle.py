"""Memory of a hub and of a contributor between rounds, against their peak in a round.

    python benchmarks/idle.py --model FOLDER [--quick] [--json] [--plot FILE]

Two contributors in real processes train LoRA for two rounds at a hub that measures the held-out loss, so that the hub
loads the model too. The hub is then paused, and the resident memory of the waiting processes is read, with and without
file pages.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from _community import Community
from _processes import MEGABYTE, Processes
from _report import Report, options

ROUNDS = 2
AIM_MB = 700
"""Aim for the idle memory in MB, most of which is the libraries; SmolLM2-135M in float32 would add 540."""
_SETTLED_SECONDS = 90.0
ROWS = [{"text": f"{n} and {n} are {2 * n}; the next number is {n + 1}."} for n in range(64)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", required=True)
    arguments = parser.parse_args()
    report = Report("idle")
    with tempfile.TemporaryDirectory(prefix="gym-idle-") as folder:
        figures = measured(Path(folder), arguments.model, 1 if arguments.quick else ROUNDS)
    for name, value in figures.items():
        report.compare(name, value, unit="MB")
    for role in ("hub", "contributor"):
        report.aim(f"{role} between rounds, MB", figures[f"{role} between rounds"], AIM_MB)
    report.finish(arguments)


def measured(folder: Path, model: Path, rounds: int) -> dict[str, float]:
    """Run the rounds; return the memory by role and moment, in megabytes."""
    heldout = folder / "heldout.jsonl"
    heldout.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:24]))
    config: dict[str, Any] = {
        "rounds": {"num_rounds": 1000, "min_contributors": 2},
        "recipe": {
            "finetuning": "lora",
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "max_length": 64,
            "learning_rate": 1e-4,
        },
        "soup": {"num_malicious_nodes": 0},
        "gate": {"heldout": str(heldout), "format": "text", "max_loss_increase": 9, "screen_updates": False},
    }
    with Processes(folder, _role) as processes:
        community = Community(processes, folder, model, config)
        waiting = [community.join(f"member{n}", ROWS[n::2], {}) for n in range(2)]
        community.wait_for_rounds(rounds, 1800)
        community.ask("pause", "--reason", "measuring")
        logs = [folder / f"member{n}.log" for n in range(2)]

        def has_ended() -> bool:
            """Return True if no round is running, during which the hub has its model in memory."""
            if not all(log.read_text().rstrip().endswith("waiting for a task") for log in logs):
                return False
            return json.loads(community.ask("status", "--json"))["round_state"] in (
                "",
                "committed",
                "aborted",
            )

        processes.wait_for("the end of the last round", has_ended, 900)
        time.sleep(_SETTLED_SECONDS)
        found = {}
        for role, members in (("hub", [community.hub]), ("contributor", waiting)):
            found[f"{role}'s peak"] = processes.peak_rss_mb[role]
            found[f"{role} between rounds"] = max(_resident(process) for process in members)
            found[f"{role} between rounds, anonymous"] = max(map(_anonymous, members))
    return found


def _resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / MEGABYTE


def _anonymous(process: psutil.Process) -> float:
    """Return the memory of a process without file pages, which the system can reclaim."""
    info = process.memory_info()
    return float(info.rss - info.shared) / MEGABYTE


def _role(command: Sequence[str]) -> str | None:
    words = " ".join(command)
    if "gym_client" in words:
        return "contributor"
    return "hub" if "gym_server" in words and " run " in words else None


if __name__ == "__main__":
    main()
