"""Several processes that train one model together, or run functions, in one start: starting them is what takes long.

``python -m tests.support.process_pair MODULE:FUNCTION FOLDER`` calls ``FUNCTION(FOLDER)`` in each.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

OPTIONS = {
    "max_steps": 3,
    "max_length": 47,
    "optimizer": "sgd",
    "optimizer_args": {"momentum": 0.9},
    "learning_rate": 0.01,
    "max_grad_norm": 0.5,
    "finetuning": "full",
    "device": "cpu",
    "num_threads": 1,
    "logging_steps": 1,
}


def run_processes(work: str, folder: Path, count: int, seconds: float = SECONDS) -> None:
    """Call ``MODULE:FUNCTION`` with ``folder`` in ``count`` processes of one group, and wait for them."""
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(count):
        own = {**os.environ, **shared, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"log-{count}-{rank}").open("wb") as log:
            command = ["python", "-P", "-m", "tests.support.process_pair", work, folder]
            started.append(WarmProcess(command, env=own, stdout=log, stderr=log))
    try:
        codes = [process.wait(seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = [(folder / f"log-{count}-{rank}").read_text(errors="replace")[-3000:] for rank in range(count)]
    assert codes == [0] * count, "\n".join(logs)


def train_all(folder: Path) -> None:
    """Train each config of ``jobs.json``, and write what is reported of it (``FOLDER/NAME/reports.json``)."""
    from accelerate.state import AcceleratorState

    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.training.trainer import Trainer

    jobs: dict[str, Any] = json.loads((folder / "jobs.json").read_text())
    for name, config in jobs.items():
        AcceleratorState._reset_state()  # accelerate keeps the first run's mesh
        reports: list[dict[str, Any]] = []
        trainer = Trainer(
            TrainingConfig.model_validate({**config, "output_dir": str(folder / name)}),
            on_report=lambda report, reports=reports: reports.append(vars(report)),  # type: ignore[misc]
        )
        result = trainer.train()
        norms = [entry["grad_norm"] for entry in result.history if "grad_norm" in entry]
        if os.environ["RANK"] == "0":
            (folder / name / "reports.json").write_text(json.dumps({"reports": reports, "norms": norms}))


def train_jobs(folder: Path, jobs: dict[str, dict[str, Any]], count: int) -> Path:
    """Train configs in ``count`` processes; each has a folder of its name in the returned one."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_processes("tests.support.process_pair:train_all", folder, count, SECONDS * len(jobs))
    return folder


def reported(folder: Path, key: str) -> list[Any]:
    """What the steps of a run reported."""
    return [report[key] for report in json.loads((folder / "reports.json").read_text())["reports"]]


def gradient_norms(folder: Path) -> list[float]:
    """The norm of each step's gradient."""
    norms: list[float] = json.loads((folder / "reports.json").read_text())["norms"]
    return norms


def main(arguments: Sequence[str]) -> None:
    """Call a function; see the module."""
    module, _, function = arguments[0].partition(":")
    getattr(importlib.import_module(module), function)(Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
