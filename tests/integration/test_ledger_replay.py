"""Anybody with the hub's folder can make its soups again, on other threads and kernels, and sees what was changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.federation import CONFIG, Federation, assert_every_contributor_counts_once_a_round
from tests.support.hub import gym_server
from tests.support.in_process import run_here
from tests.support.quick import quick
from tests.support.warm import run

RECIPES: dict[str, dict[str, Any]] = {
    "signs": {
        "soup": {
            "aggregator": "byzantine_robust",
            "num_malicious_nodes": 1,
            "server_optimizer": "momentum",
            "server_optimizer_options": {"momentum": 0.5},
            "codec": {"codec": "bitdelta", "error_feedback": True},
        }
    },
    "sparse": {
        "soup": {
            "aggregator": "byzantine_robust",
            "num_malicious_nodes": 1,
            "server_optimizer": "nesterov",
            "server_learning_rate": 0.7,
        },
        "codec": {"codec": "sparse_sign"},
        "recipe": {**CONFIG["recipe"], "keep_optimizer_state": True},
    },
    "trimmed": {
        "soup": {
            "aggregator": "trimmed_mean",
            "pre_aggregators": ["norm_cap", "nnm"],
            "num_malicious_nodes": 1,
        }
    },
    "trust": {
        "soup": {"aggregator": "fltrust", "num_malicious_nodes": 1},
        "root": {"data": "root.jsonl"},
        "codec": {"codec": "dense"},
    },
}


def replay(folder: Path, server_round: int) -> subprocess.CompletedProcess[str]:
    return run_here(replay_command(folder, server_round))


def replay_command(folder: Path, server_round: int) -> list[str | Path]:
    return ["gym-server", "ledger", "replay", str(server_round), "--dir", folder, "--json"]


@pytest.fixture(params=quick(sorted(RECIPES), "signs"))
def finished(request: pytest.FixtureRequest, tmp_path: Path, tiny_base: Path) -> Any:
    """The folder of a hub that has committed two rounds of three contributors."""
    federation = Federation(tmp_path, tiny_base, **RECIPES[request.param])
    federation.hub.configure({"rounds": {"min_contributors": 3}})
    row = {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "ann ann"}]}
    (federation.hub.folder / "root.jsonl").write_text((json.dumps(row) + "\n") * 12)
    try:
        federation.hub.start("--exit-when-done")
        names = ("ann", "bob", "cat")
        for name in names:
            federation.join(name)
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, set(names))
        kept = len(list(tmp_path.glob("*/residuals/*/moments.safetensors")))
        assert kept == (len(names) if request.param == "sparse" else 0)
        yield federation.hub.folder
    finally:
        federation.close()


def test_every_round_gives_its_soup_again_and_nothing_that_was_changed_goes_unseen(finished: Path) -> None:
    threads = (
        {"OMP_NUM_THREADS": "1", "GYM_KERNELS": "avx2"},
        {"OMP_NUM_THREADS": "2"},
        {"GYM_KERNELS": "torch"},
    )
    found = [
        json.loads(run(replay_command(finished, 2), env={**os.environ, **chosen}).stdout)
        for chosen in threads
    ]
    assert found[0] == found[1] == found[2]
    for replayed in (found[0], json.loads(replay(finished, 1).stdout)):
        assert replayed["same"]
        assert replayed["replayed"] == replayed["soup"]
        assert replayed["updates"] == 3
    assert not list((finished / "staging").iterdir())

    missing = replay(finished, 7)
    assert missing.returncode != 0
    assert "round 7 has no version" in missing.stderr

    entries = gym_server("ledger", "show", "--dir", str(finished))
    merged = [e["body"] for e in entries if e["kind"] == "verdict" and e["body"].get("delta")]
    victim = next(b for b in merged if b["server_round"] == 2)["delta"]
    (path,) = (finished / "objects").rglob(victim)
    kept = finished / "kept"
    shutil.copyfile(path, kept)
    path.chmod(0o644)
    path.write_bytes(kept.read_bytes()[:-1] + bytes([kept.read_bytes()[-1] ^ 1]))
    changed = replay(finished, 2)
    assert changed.returncode != 0
    assert f"object {victim} does not match its sha256" in changed.stderr
    path.write_bytes(kept.read_bytes())
    assert json.loads(replay(finished, 2).stdout)["same"]

    version = next(e["body"] for e in entries if e["kind"] == "version")
    assert {state.name for state in (finished / "residuals").glob("round-1.*")} == {
        {"residual": "round-1.safetensors", "optimizer": "round-1.optimizer.safetensors"}[kind]
        for kind in version["state"]
    }
    for state in (finished / "residuals").glob("round-1.*"):
        shutil.move(state, kept)
        without = replay(finished, 2)
        assert without.returncode != 0
        assert f"{state}, has sha256 none; the ledger says" in without.stderr
        shutil.move(kept, state)
