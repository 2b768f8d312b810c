"""A hub whose ServerApp is Flower's own FedAvg, unchanged: `python -m tests.support.fedavg_hub FOLDER RESULT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gym_server  # noqa: F401  (sets Flower's variables)
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from gym_server.cli.run import run_hub

from tests.support.wait import SECONDS


def main(folder: Path, result_path: Path) -> None:
    """Two rounds of FedAvg over two contributors; the result goes to ``result_path`` as JSON."""

    def app(grid: Grid) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=2, min_train_nodes=2)
        result = strategy.start(
            grid,
            ArrayRecord([np.zeros((3, 2), np.float32), np.ones(4, np.float64)]),
            num_rounds=2,
            timeout=SECONDS,
            train_config=ConfigRecord({"step": 2.0}),
        )
        found = {
            "arrays": [a.tolist() for a in result.arrays.to_numpy_ndarrays()],
            "train": {r: dict(m) for r, m in result.train_metrics_clientapp.items()},
            "evaluate": {r: dict(m) for r, m in result.evaluate_metrics_clientapp.items()},
        }
        result_path.write_text(json.dumps(found))

    def listening(federation: object, port: int) -> None:
        print(json.dumps({"port": port, "fingerprint": federation.fingerprint}), flush=True)  # type: ignore[attr-defined]

    run_hub(folder, exit_when_done=True, on_listening=listening, server_app=app)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
