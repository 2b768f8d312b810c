"""Two real processes and one end with the same weights, for algorithms whose losses are means of several kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.trainer import Trainer

LENGTHS = (1, 9, 2, 14, 5, 3, 11, 1, 7, 4, 2, 6)
TOLERANCE = 1e-5


def prompt(index: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "double: " + "ab" * (1 + index % 4)}]


def answer(length: int, letter: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": letter * length}]


CHATS = [{"messages": prompt(i) + answer(n, "c")} for i, n in enumerate(LENGTHS)]
FORGOTTEN = [{**row, "forget": True} for row in CHATS] + [
    {"messages": prompt(i) + answer(1 + i * 3 % 11, "e")} for i in range(len(LENGTHS))
]
PAIRS = [
    {"prompt": prompt(i), "chosen": answer(n, "c"), "rejected": answer(LENGTHS[-1 - i], "d")}
    for i, n in enumerate(LENGTHS)
]
LIKED = [
    {"prompt": prompt(i), "completion": answer(n, "cd"[i % 2]), "label": i % 3 > 0}
    for i, n in enumerate(LENGTHS)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": CHATS,
    "gradient_difference": FORGOTTEN,
    "npo": FORGOTTEN,
    "orpo": PAIRS,
    "dpo": PAIRS,
    "kto": LIKED,
}


def train(algorithm: str, folder: Path, size: int, accumulation: int) -> dict[str, Any]:
    """The trained weights, in memory."""
    config = TrainingConfig(
        algorithm=algorithm,
        output_dir=folder / algorithm,
        max_steps=3,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        optimizer="sgd",
        learning_rate=0.05,
        max_length=64,
        device="cpu",
        num_threads=1,
        save_final=False,
    )
    nano = load_model("gym-nano")
    result = Trainer(config, model=nano.model, tokenizer=nano.tokenizer).train(ROWS[algorithm])
    return {name: weight.detach().clone().contiguous() for name, weight in result.model.named_parameters()}


def main(folder: Path) -> None:
    """What each of the two processes does."""
    from gym_fed.training.processes import group as processes

    for algorithm in ROWS:
        found = train(algorithm, folder, 1, 3)
        if processes.is_main():
            save_file(found, folder / f"{algorithm}.safetensors")
    if processes.is_main():
        (folder / "counted.json").write_text(json.dumps(processes.world_size()))
    processes.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*launched, __file__, str(folder)], capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert json.loads((folder / "counted.json").read_text()) == 2
    return folder


@pytest.mark.slow  # two processes that load and train every algorithm: a minute of one core
@pytest.mark.parametrize("algorithm", list(ROWS))
def test_two_processes_of_three_rows_each_are_one_of_six(algorithm: str, two: Path, tmp_path: Path) -> None:
    alone, shared = train(algorithm, tmp_path, 6, 1), load_file(two / f"{algorithm}.safetensors")
    start = dict(load_model("gym-nano").model.named_parameters())
    moved = max(float((alone[name] - start[name].detach()).abs().max()) for name in alone)
    assert moved > 20 * TOLERANCE, "a run that moves nothing would equal any other"
    assert max(float((alone[name] - shared[name]).abs().max()) for name in shared) < TOLERANCE


if __name__ == "__main__":
    main(Path(sys.argv[1]))
