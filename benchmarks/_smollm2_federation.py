"""Three contributors teach SmolLM2 over the real network: `gym-server run` and three `gym-client join`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from demo.processes import run_federation  # noqa: E402
from gym_fed.local_federation import BIN, ask, join_command  # noqa: E402

CONTRIBUTORS = ("ada", "ben", "cleo")
ROWS_EACH = 400
GATE_ROWS = 16
"""Of those that nobody learns; the hub measures the base, each update and the soup on them."""
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"finetuning": "lora", "lora": {"r": 8, "lora_alpha": 16}, "learning_rate": 2e-4},
    "one-bit": {"finetuning": "full", "learning_rate": 2e-5},
}
"""Part of the recipe: LoRA factors in bf16, or the full delta at one bit a weight."""


def federate(
    folder: Path, model: Path, rows: list[dict[str, Any]], kind: str, seed: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Run one federation to its end.

    Returns:
        Held-out loss (nats per token, by the hub's gate) before and after, bytes up per contributor and round, the size
        of all weights in bf16, and seconds.
    """
    folder.mkdir(parents=True)
    parts = {"heldout": rows[-GATE_ROWS:]}
    for number, name in enumerate(CONTRIBUTORS):
        start = (seed * len(CONTRIBUTORS) + number) * ROWS_EACH
        parts[name] = rows[start : start + ROWS_EACH]
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
        )
    subprocess.run([BIN / "gym-server", "init", "--dir", folder / "hub"], check=True, capture_output=True)
    recipe = {
        "algorithm": "sft",
        **KINDS[kind],
        "max_steps": steps,
        "seed": seed,
        "per_device_train_batch_size": 2,
        "max_length": 256,
    }
    config = {
        "listen": "127.0.0.1:0",
        "base_model": str(model),
        "enrolment": {"policy": "open"},
        "rounds": {
            "num_rounds": rounds,
            "min_contributors": len(CONTRIBUTORS),
            "deadline_seconds": 3600,
            "lease_seconds": 600,
        },
        "recipe": recipe,
        "soup": {"aggregator": "mean"},
        "gate": {"heldout": "../heldout.jsonl", "max_length": 256},
    }
    (folder / "hub" / "gym-server.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def joiner(name: str) -> Any:
        return lambda address, key: join_command(
            folder, name, address, key, "--base", model, "--device", "cpu"
        )

    seconds = run_federation(
        folder, {name: joiner(name) for name in CONTRIBUTORS}, lambda event: print(event, file=sys.stderr)
    )
    found = ask(folder, "rounds")
    updates = [update for one in found for update in one["updates"]]
    if len(updates) != rounds * len(CONTRIBUTORS):
        raise SystemExit(f"{kind}: {len(updates)} updates in {rounds} rounds of {len(CONTRIBUTORS)}")
    return {
        "before": found[0]["heldout_before"],
        "after": found[-1]["heldout_after"],
        "up_bytes": sum(update["bytes"] for update in updates) / len(updates),
        "bf16_bytes": (model / "model.safetensors").stat().st_size // 2,
        "seconds": seconds,
    }
