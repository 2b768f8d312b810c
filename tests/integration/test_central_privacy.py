"""A private federation of real processes: the same noise after a kill, and the end where the budget ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_fed.privacy.accountant import NoiseEvent, epsilon
from tests.support.federation import POOL, Federation
from tests.support.hub import HubProcess
from tests.support.ports import free_port
from tests.support.private_hub import PRIVATE
from tests.support.wait import SECONDS

NAMES = ("ann", "bob", "cat")


@pytest.mark.slow
def test_a_killed_hub_adds_the_same_noise_again_and_the_run_ends_where_the_budget_does(
    tmp_path: Path, tiny_base: Path
) -> None:
    one = epsilon([NoiseEvent(noise_multiplier=2.0)], 1e-5)
    private = {
        **PRIVATE,
        "rounds": {"num_rounds": 3, "min_contributors": 2, "deadline_seconds": 240, "lease_seconds": 6},
        "rewards": {**PRIVATE["rewards"], "pool": POOL},
        "privacy": {
            "noise_multiplier": 2.0,
            "clipping_norm": 0.5,
            "epsilon": 1.1 * one,
            "end_when_spent": True,
        },
    }
    federation = Federation(tmp_path, tiny_base, **private)
    hub = federation.hub
    try:
        hub.start("--exit-when-done", failpoints="before-commit")
        for name in ("ann", "bob"):
            federation.join(name)
        hub.wait_killed()
        for process in federation.clients.values():
            process.send_signal(
                signal.SIGSTOP
            )  # away when the hub comes back and ends, as a busy machine may have it
        stored = {path.name for path in (hub.folder / "objects").rglob("*") if path.is_file()}
        hub.start()  # it still serves when it is done, so that a late client learns why
        hub.wait_for("the end", lambda: "serving until stopped" in hub.log(), 3 * SECONDS)
        for process in federation.clients.values():
            process.send_signal(signal.SIGCONT)
        for name, process in federation.clients.items():
            assert process.wait(timeout=3 * SECONDS) == 0, federation.log(name)[-3000:]
        assert hub.stop() == 0
        spent = hub.ask("privacy")
        assert spent["central"]["epsilon_spent"] == pytest.approx(one)
        assert [row["epsilon"] for row in spent["contributors"]] == [pytest.approx(one)] * 2
        assert [r["state"] for r in hub.ask("rounds")] == ["committed"]
        version = next(e["body"] for e in hub.ask("ledger", "show") if e["kind"] == "version")
        assert version["soup"] in stored  # made before the kill, byte for byte
        assert hub.ask("ledger", "replay", "1")["replayed"] == version["soup"]
        assert hub.ask("ledger", "verify")["valid"]
        assert "stopped: the privacy budget is spent" in hub.log()
        for name in ("ann", "bob"):
            assert "the privacy budget is spent" in federation.log(name)
        assert json.dumps(hub.ask("status")["privacy"])
    finally:
        federation.close()


def events_of(federation: Federation, name: str, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in federation.log(name).splitlines() if line.startswith("{")]
    return [event for event in lines if event["event"] == kind]


@pytest.mark.slow
@pytest.mark.shared
def test_the_rule_that_a_privacy_budget_selects_runs_and_its_epsilon_is_the_accountants_everywhere(
    tmp_path: Path, shared_folder: Path
) -> None:
    base = shared_folder / "models" / "stories260K"
    clean = tmp_path / "clean.jsonl"
    clean.write_text(
        "".join(json.dumps({"prompt": f"Tom {n}", "completion": "ran home."}) + "\n" for n in range(8))
    )
    federation = Federation(tmp_path, base)
    listen = f"127.0.0.1:{free_port()}"
    hub = federation.hub = HubProcess(
        tmp_path / "private",
        {
            "recipe": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 32},
            "rounds": {"deadline_seconds": 240, "lease_seconds": 30},
            "dashboard": {"listen": listen, "public": True},
        },
        str(base),
        ("--epsilon", "8", "--root-data", str(clean), "--num-rounds", "2", "--min-contributors", "3"),
    )
    try:
        hub.start()
        for name in NAMES:
            rows = [{"prompt": f"{name} {n}", "completion": "ran home."} for n in range(6)]
            federation.join(name, arguments=("--json",), rows=rows)
        committed = lambda: [r["state"] for r in hub.ask("rounds")] == ["committed"] * 2  # noqa: E731
        hub.wait_for("two rounds", committed, 6 * SECONDS)
        for name, process in federation.clients.items():
            assert process.wait(timeout=3 * SECONDS) == 0, federation.log(name)[-3000:]
        spent = hub.ask("privacy")
        promise = spent["central"]
        noise = NoiseEvent(noise_multiplier=promise["noise_multiplier"], count=2)
        total = epsilon([noise], promise["target_delta"])
        assert 7.9 < total <= 8.0
        assert (promise["aggregator"], promise["epsilon"], promise["epsilon_spent"]) == (
            "root_gate",
            8.0,
            total,
        )
        page = httpx.get(f"http://{listen}/api/v1/privacy", timeout=SECONDS).json()
        assert page["central"] == promise
        assert {one["epsilon"] for one in page["contributors"]} == {total}
        for name in NAMES:
            (offer,) = events_of(federation, name, "offer")
            terms = offer["privacy"]["central"]
            assert (terms["aggregator"], terms["epsilon"]) == ("root_gate", 8.0)
            assert terms["noise_multiplier"] == noise.noise_multiplier
            assert events_of(federation, name, "hub-privacy")[-1]["epsilon"] == total
        entries = hub.ask("ledger", "show")
        costs = [entry["body"]["epsilon"] for entry in entries if entry["kind"] == "privacy"]
        assert costs == [
            epsilon([noise.model_copy(update={"count": n})], promise["target_delta"]) for n in (1, 2)
        ]
        versions = [entry["body"] for entry in entries if entry["kind"] == "version"]
        assert {version["recipe"]["aggregator"] for version in versions} == {"root_gate"}
        for number, version in enumerate(versions, start=1):
            assert hub.ask("ledger", "replay", str(number))["replayed"] == version["soup"]
        assert hub.ask("ledger", "verify")["valid"]
    finally:
        federation.close()
