"""Two real processes share one run: they end with the weights of one process that sees the same batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from gym_fed.base.models import load_model
from tests.support import warm
from tests.support.in_process import run_here
from tests.support.quick import quick
from tests.support.wait import SECONDS

CONFIG = """
model: gym-nano
data: [{tasks: [double], num_examples: 64}]
max_steps: 6
max_length: 48
optimizer: sgd
optimizer_args: {momentum: 0.9}
learning_rate: 0.05
device: cpu
num_threads: 1
logging_steps: 1
"""
STRATEGIES = {
    "ddp": ["distributed.strategy=ddp"],
    "fsdp2": ["distributed.strategy=fsdp2"],
    "tensor_parallel": ["distributed.strategy=tensor_parallel"],
    "sequence_parallel": ["distributed.strategy=sequence_parallel"],
    "pipeline_parallel": ["distributed.strategy=pipeline_parallel", "gradient_accumulation_steps=2"],
    "zero2": ["distributed.strategy=deepspeed"],
    "zero3": ["distributed.strategy=deepspeed", "distributed.zero_stage=3"],
}
SPLIT = ("fsdp2", "sequence_parallel", "pipeline_parallel")
# SGD adds up gradients as they are. Adam would divide each by its own size, and so enlarge the rounding of sums in
# another order to 2e-5 and more.
TOLERANCE = 1e-6
FLAGS = ("--no-check", "--json")


def command(folder: Path, nproc: int, settings: list[str]) -> list[str]:
    file = folder.parent / "config.yaml"
    file.write_text(CONFIG, encoding="utf-8")
    shares_rows = {f"distributed.strategy={name}" for name in ("tensor_parallel", "sequence_parallel")}
    rows = 8 if nproc == 1 or shares_rows & set(settings) else 8 // nproc
    words = [f"output_dir={folder}", f"per_device_train_batch_size={rows}", *settings]
    processes = ["--nproc", str(nproc)] if nproc > 1 else []
    sets = [part for word in words for part in ("--set", word)]
    return ["gym", "train", str(file), *processes, *sets, *FLAGS]


def start(folder: Path, nproc: int, settings: list[str]) -> warm.WarmProcess:
    python = warm.python_shim(folder.parent / "python")
    words = command(folder, nproc, settings)
    return warm.WarmProcess(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, python=python)


def run(folder: Path, nproc: int, settings: list[str]) -> dict[str, object]:
    python = warm.python_shim(folder.parent / "python")
    ended = warm.run(command(folder, nproc, settings), timeout=SECONDS, python=python)
    assert ended.returncode == 0, ended.stderr[-3000:]
    figures: dict[str, object] = json.loads(ended.stdout)
    return figures


def far(a: Path, b: Path) -> float:
    """The largest difference of a weight."""
    one, two = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert run(folder, 1, [])["num_processes"] == 1
    start = load_model("gym-nano").model.state_dict()
    trained = load_file(folder / "model.safetensors")
    moved = max((trained[name] - start[name]).abs().max().item() for name in trained)
    assert moved > 1000 * TOLERANCE, "a run that moves nothing would equal any other"
    return folder


@pytest.mark.parametrize("name", quick(["tensor_parallel", "zero2", "zero3"]))
def test_two_processes_give_the_weights_of_one(name: str, alone: Path, tmp_path: Path) -> None:
    figures = run(tmp_path / "run", 2, STRATEGIES[name])
    assert figures["num_processes"] == 2
    assert far(tmp_path / "run", alone) < TOLERANCE
    model = load_model(str(tmp_path / "run")).model
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.slow
def test_the_processes_of_a_machine_without_a_gpu_train_one_model_by_default(
    alone: Path, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU: the default device is another")
    figures = run(tmp_path / "run", 2, [*STRATEGIES["ddp"], "device=auto"])
    assert figures["num_processes"] == 2
    assert far(tmp_path / "run", alone) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "number"),
    quick([("ddp", signal.SIGINT), ("ddp", signal.SIGTERM), *((name, signal.SIGINT) for name in SPLIT)]),
)
def test_a_signal_reaches_every_process_once_and_the_same_command_resumes(
    name: str, number: signal.Signals, alone: Path, tmp_path: Path
) -> None:
    started = start(tmp_path / "run", 2, STRATEGIES[name])
    assert started.stderr is not None
    printed = []
    for line in started.stderr:
        printed.append(line)
        # The first step is kept once every process has counted it, just after its line is printed.
        if line.startswith("step 2/"):
            os.kill(started.pid, number)
    assert started.wait(SECONDS) == 128 + number, "".join(printed)
    assert "a checkpoint is in" in "".join(printed)
    figures = run(tmp_path / "run", 2, STRATEGIES[name])
    assert figures["num_processes"] == 2
    assert far(tmp_path / "run", alone) < TOLERANCE


@pytest.mark.parametrize(
    ("before", "after"),
    quick(
        [
            (("fsdp2", 2), ("ddp", 1)),
            (("ddp", 1), ("ddp", 2)),
            (("sequence_parallel", 2), ("ddp", 1)),
        ],
        (("ddp", 1), ("ddp", 2)),
    ),
)
def test_a_run_resumes_on_another_number_of_processes(
    before: tuple[str, int], after: tuple[str, int], alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    started = start(folder, before[1], [*STRATEGIES[before[0]], "save_steps=1"])
    assert started.stderr is not None
    for line in started.stderr:
        if line.startswith("step 2/"):
            os.kill(started.pid, signal.SIGINT)
    assert started.wait(SECONDS) == 128 + signal.SIGINT
    figures = run(folder, after[1], [*STRATEGIES[after[0]], "save_steps=1"])
    assert figures["num_processes"] == after[1]
    assert far(folder, alone) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence_parallel", "pipeline_parallel"])
def test_the_end_of_one_process_ends_the_others(name: str, tmp_path: Path) -> None:
    settings = [*STRATEGIES[name], "max_steps=100000"]
    started = start(tmp_path / "run", 2, settings)
    assert started.stderr is not None
    for line in started.stderr:
        if line.startswith("step 2/"):
            break
    children = psutil.Process(started.pid).children(recursive=True)
    workers = [child for child in children if child.environ().get("RANK") == "1"]
    assert workers
    workers[0].kill()
    assert started.wait(SECONDS) != 0
    assert "process 1 was ended by signal 9" in started.stderr.read()
    assert not psutil.wait_procs(children, SECONDS)[1]


def test_a_strategy_that_needs_others_is_refused_alone(tmp_path: Path) -> None:
    words = command(tmp_path / "run", 1, ["distributed.strategy=fsdp2"])
    ended = run_here(words)
    assert ended.returncode == 10
    assert "distributed.strategy: fsdp2 needs several processes, but there is only one" in ended.stderr
    assert not (tmp_path / "run").exists()
