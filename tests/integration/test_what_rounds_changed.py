"""At the end of a federation the hub reports what its rounds have changed; `gym-server compare` does at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.data import generate
from gym_fed.evaluation import retention
from tests.support.hub import HubProcess as Hub
from tests.support.hub import start_client
from tests.support.in_process import run_here

RATE = {"learning_rate": 1e-3, "max_steps": 6, "max_length": 48, "per_device_train_batch_size": 8}
CONFIG: dict[str, Any] = {
    "check": True,
    "rounds": {"num_rounds": 1, "min_contributors": 1, "deadline_seconds": 120},
    "recipe": RATE,
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "gate": {"heldout": "task:shout", "max_examples": 24, "max_length": 48, "max_loss_increase": 9.0},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hub, list[dict[str, Any]]]:
    """A hub whose only round is done, and the events that `gym-server run` printed after it listened."""
    folder = tmp_path_factory.mktemp("ended")
    hub = Hub(folder / "hub", CONFIG)
    hub.start("--exit-when-done")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in generate("shout", 48)))
    client = start_client(folder / "ada", hub, "--data", str(rows))
    hub.wait_done()
    client.kill()
    assert hub.process is not None
    assert hub.process.stdout is not None
    return hub, [json.loads(line) for line in hub.process.stdout if line.startswith("{")]


def test_a_federation_ends_with_the_held_out_loss_and_what_was_kept(
    ended: tuple[Hub, list[dict[str, Any]]],
) -> None:
    hub, events = ended
    assert [event["event"] for event in events] == ["round", "change"], hub.log()[-3000:]
    round_, change = events
    assert change["version"] == 1
    held = change["held_out"]
    assert held["num_rows"] == 24
    assert held["change"] == pytest.approx(held["value"] - held["before"])
    assert held["change"] < 0, "the round learned what the held-out rows ask"
    assert round_["heldout_after"] < round_["heldout_before"]
    assert change["retention"]["num_items"] == 120
    assert change["retention"]["before"] < change["retention"]["after"]


@pytest.mark.slow
def test_compare_measures_again_what_the_hub_printed(ended: tuple[Hub, list[dict[str, Any]]]) -> None:
    hub, events = ended
    again = hub.ask("compare")
    for part in ("held_out", "retention"):
        for key, value in events[1][part].items():
            assert again[part][key] == pytest.approx(value, abs=1e-4), (part, key)


@pytest.fixture
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the items of retention: an answer to each of 120 takes long."""
    monkeypatch.setattr(retention, "_NANO_ITEMS", 12)


@pytest.mark.usefixtures("few_items")
def test_compare_prints_what_changed_in_words(ended: tuple[Hub, list[dict[str, Any]]]) -> None:
    hub, events = ended
    found = hub.ask("compare")
    for key, value in events[1]["held_out"].items():
        assert found["held_out"][key] == pytest.approx(value, abs=1e-4), key
    done = run_here(["gym-server", "compare", "--dir", hub.folder])
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("version 0 -> 1, 24 held-out rows: loss ")
    assert " -> " in first
    assert "±" in first
    assert second.startswith("lost: " if found["retention"]["is_lost"] else "kept: ")
    assert ("lost general knowledge" in done.stderr) is found["retention"]["is_lost"]
    assert hub.ask("compare", "--version", "0")["held_out"]["change"] == 0


def test_a_finished_hub_without_the_check_reports_nothing_more(
    ended: tuple[Hub, list[dict[str, Any]]], tmp_path: Path
) -> None:
    hub, _ = ended
    hub.start("--exit-when-done", "--set", "check=false")
    hub.wait_done()
    assert hub.process is not None
    assert hub.process.stdout is not None
    assert not [line for line in hub.process.stdout if '"change"' in line]


@pytest.mark.usefixtures("few_items")
def test_the_comparison_counts_every_loss_and_answer_to_its_total(
    ended: tuple[Hub, list[dict[str, Any]]],
) -> None:
    from gym_server.cli.options import opened
    from gym_server.evaluations.change import measure_change
    from gym_server.rounds.hub_model import HubModel

    totals: list[int] = []
    done: list[int] = []
    with opened(ended[0].folder) as fed:
        model = HubModel.of(fed.state, fed.config)
        change = measure_change(
            model, fed.round_store.soups(1), 1, on_begin=totals.append, on_done=done.append
        )
    assert change.retention is not None
    assert totals == [2 * (24 + change.retention.num_items + change.retention.num_questions)]
    assert sum(done) == totals[0]
    assert len(done) > 4, "the count moves while it is shown"
