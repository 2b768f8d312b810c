"""Our apps on a stock Flower SuperLink: those of the hub, and an app of plain arrays with DeltaSoup for a strategy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gym_fed.core.library_env import VARIABLES
from tests.support.hub import BIN, HubProcess
from tests.support.wait import SECONDS

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def stock_flower(
    folder: Path, app: str, run_config: str, nodes: int
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A SuperLink, SuperNodes and `flwr run` of an app of ``tests/support``, all as processes."""
    port, ports = free_port(), [free_port() for _ in range(nodes)]
    (folder / "flwr-home").mkdir()
    config = (
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    (folder / "flwr-home" / "config.toml").write_text(config)
    shutil.copytree(SUPPORT / app, folder / "app")
    environment = os.environ | VARIABLES | {"FLWR_HOME": str(folder / "flwr-home"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, *command: str) -> None:
        with open(folder / f"{name}.log", "wb") as log:
            processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], cwd=folder, env=environment, stdout=log, stderr=log
            )

    try:
        start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        end = time.monotonic() + SECONDS
        while not is_listening(port):
            assert time.monotonic() < end, (folder / "superlink.log").read_text()
            time.sleep(0.1)
        for index in range(nodes):
            node = ("--superlink", f"127.0.0.1:{port}", "--port", str(ports[index]))
            partition = ("--node-config", f"partition-id={index} num-partitions={nodes}")
            start(f"supernode{index}", "flower-supernode", "--insecure", *node, *partition)
        start("run", "flwr", "run", str(folder / "app"), "here", "--run-config", run_config)
        yield processes
    finally:
        for process in reversed(processes.values()):
            process.terminate()
        for process in processes.values():
            try:
                process.wait(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def logs_of(folder: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("*.log")))


@pytest.mark.slow  # a dozen processes that import torch, one after the other
def test_the_two_apps_merge_two_rounds_on_a_stock_superlink(tmp_path: Path, tiny_base: Path) -> None:
    hub = HubProcess(
        tmp_path / "hub",
        {
            "rounds": {"num_rounds": 2, "min_contributors": 2, "deadline_seconds": 200},
            "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
            "recipe": {"max_steps": 3, "per_device_train_batch_size": 4, "max_length": 64},
        },
        str(tiny_base),
    )
    for index, (asked, answer) in enumerate([("hi there", "yes"), ("what is 7 + 2?", "NINE, I THINK")]):
        row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        (tmp_path / f"data{index}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    settings = {
        "hub-dir": hub.folder,
        "home": tmp_path / "home{partition}",
        "data": tmp_path / "data{partition}.jsonl",
        "model": tiny_base,
    }
    run_config = " ".join(f'{key}="{value}"' for key, value in settings.items())
    with stock_flower(tmp_path, "flower_app", run_config, nodes=2):
        end = time.monotonic() + 3 * SECONDS
        while sum(r["state"] == "committed" for r in hub.ask("rounds")) < 2:
            assert time.monotonic() < end, logs_of(tmp_path)
            time.sleep(1)
    for found in hub.ask("rounds"):
        assert [u["verdict"] for u in found["updates"]] == ["merged", "merged"]
        assert len({u["contributor"] for u in found["updates"]}) == 2
    assert hub.ask("ledger", "verify")["valid"]


@pytest.mark.slow  # a minute: a whole app of Flower in its own processes, trained to the end
def test_an_app_of_plain_arrays_withstands_a_malicious_client_with_delta_soup(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    with stock_flower(tmp_path, "flower_arrays_app", f'out="{out}"', nodes=3):
        end = time.monotonic() + 2 * SECONDS
        while not out.exists():
            assert time.monotonic() < end, logs_of(tmp_path)
            time.sleep(0.5)
    found = json.loads(out.read_text())
    # Round 1: NaN, so that two replies are left, too few against one attacker: no change. Round 2: 1e30, refused by
    # its norm. Round 3: a plausible lie, which the trimmed mean drops: half the way from 0 to 1.
    assert found["w"] == [[0.5] * 3] * 2
    assert found["b"] == [0.5] * 3
