"""A contributor whose update lowers the held-out loss and makes the model forget a task: real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.data.generated import generate
from tests.support.hub import HubProcess, gym_server, start_client
from tests.support.wait import SECONDS

LEARNT, FORGOTTEN = "shout", "tiny_capital"
CONFIG: dict[str, Any] = {
    "rounds": {
        "num_rounds": 1,
        "min_contributors": 1,
        "deadline_seconds": 240,
        "backoff_seconds": 600,
        "backoff_max_seconds": 600,
    },
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "recipe": {"max_steps": 40, "per_device_train_batch_size": 8, "max_length": 64, "learning_rate": 3.0e-3},
}
EVALS = [{"suite": FORGOTTEN, "limit": 12, "max_drop": 0.1, "apply_chat_template": True}]


def round_with(folder: Path, gate: dict[str, Any]) -> tuple[dict[str, Any], HubProcess]:
    """The first round of a hub with this gate and one contributor, as `gym-server rounds` has it."""
    hub = HubProcess(folder / "hub", {**CONFIG, "gate": gate})
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in generate(LEARNT, 200, seed=3, split="train")))
    hub.start()
    client = start_client(folder / "forgetter", hub, "--data", str(rows), "--name", "forgetter")
    try:
        found = hub.wait_for(
            "the round's end",
            lambda: [r for r in hub.ask("rounds") if r["state"] in ("committed", "aborted")],
            4 * SECONDS,
        )
    finally:
        client.kill()
        client.wait()
        hub.stop()
    return found[0], hub


@pytest.mark.slow  # two hubs whose gates evaluate
def test_an_update_that_forgets_a_task_passes_the_loss_alone_and_is_rolled_back_by_evaluations(
    tmp_path: Path,
) -> None:
    (tmp_path / "loss").mkdir()
    (tmp_path / "evals").mkdir()
    loss = {"heldout": f"task:{LEARNT}", "max_examples": 40}
    by_loss, other = round_with(tmp_path / "loss", loss)
    assert by_loss["state"] == "committed"
    assert by_loss["heldout_after"] < by_loss["heldout_before"] / 2

    asked = ("eval", "--suite", FORGOTTEN, "--limit", "12", "--apply-chat-template")
    versions = other.ask(*asked)
    assert [(line["version"], line["cached"]) for line in versions] == [(0, False), (1, False)]
    assert versions[0]["value"] == 1.0
    assert versions[1]["value"] < 0.5, "the version that the loss let through has forgotten the task"
    again = other.ask(*asked)
    assert [line["cached"] for line in again] == [True, True]
    assert [line["value"] for line in again] == [line["value"] for line in versions]
    assert other.ask("status")["evaluation"] is None

    by_evals, hub = round_with(tmp_path / "evals", {**loss, "evals": EVALS})
    assert by_evals["state"] == "aborted"
    assert f"rolled back: the soup changes {FORGOTTEN} from 1.0000 to 0." in by_evals["reason"]
    assert "12 rows" in by_evals["reason"]
    (entry,) = hub.ask("ledger", "show", "--kind", "evaluated")
    assert entry["body"]["outcome"] == "rolled back"
    assert entry["body"]["suites"][0]["tasks"][FORGOTTEN]["bound"] > EVALS[0]["max_drop"]
    shown = hub.ask("status")["evaluation"]
    assert (shown["outcome"], shown["tasks"][FORGOTTEN]["before"]) == ("rolled back", 1.0)
    assert hub.ask("ledger", "verify")["evaluation_seeds"] >= 1
    exported = tmp_path / "ledger.jsonl"
    hub.ask("ledger", "export", str(exported))
    assert gym_server("ledger", "verify", "--ledger", str(exported))["valid"]
