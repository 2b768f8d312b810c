"""Flower's own strategies run on the hub's grid unchanged, over gRPC with TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.hub import HubProcess
from tests.support.wait import SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]


def python(module: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=REPOSITORY,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_flowers_fedavg_trains_and_evaluates_two_rounds_on_the_hub(tmp_path: Path, tiny_base: Path) -> None:
    hub = HubProcess(tmp_path / "hub", base_model=str(tiny_base))
    result_path = tmp_path / "result.json"
    server = python("tests.support.fedavg_hub", hub.folder, result_path, stdout=subprocess.PIPE)
    assert server.stdout is not None
    event = json.loads(server.stdout.readline())
    address = f"127.0.0.1:{event['port']}"
    clients = [
        python("tests.support.numpy_client", tmp_path / f"home{i}", address, event["fingerprint"])
        for i in range(2)
    ]
    try:
        assert server.wait(timeout=2 * SECONDS) == 0
    finally:
        for process in (server, *clients):
            process.kill()
            process.wait()
    result = json.loads(result_path.read_text())
    assert result["arrays"] == [[[4.0, 4.0]] * 3, [5.0] * 4]  # two rounds, each adds two
    assert [result["train"][r]["round"] for r in ("1", "2")] == [1.0, 2.0]
    assert result["evaluate"]["2"]["loss"] == 4.0 * 6 + 5.0 * 4
