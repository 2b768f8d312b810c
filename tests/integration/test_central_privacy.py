"""A private federation of real processes: the same noise after a kill, and the end where the budget ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gym_fed.privacy.accountant import NoiseEvent, epsilon
from tests.support.federation import POOL, Federation
from tests.support.private_hub import PRIVATE
from tests.support.wait import SECONDS


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
