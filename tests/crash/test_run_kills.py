"""SIGKILL in the midst of a run that goes on from an adapter: resumed, it ends with the bits of one left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.adapters import run
from tests.support.wait import SECONDS

_GYM = [sys.executable, "-c", "from gym_fed.cli.main import main; main()"]


@pytest.mark.slow  # three runs, one after the other
def test_a_killed_run_from_an_adapter_ends_with_the_same_bits(tiny_base: Path, tmp_path: Path) -> None:
    run(tmp_path / "sft", model=str(tiny_base))
    values = {
        "model": str(tiny_base),
        "adapter": str(tmp_path / "sft"),
        "finetuning": "lora",
        "data": [{"tasks": ["copy"], "num_examples": 64}],
        "max_steps": 24,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 48,
        "device": "cpu",
        "num_threads": 1,
    }
    for name in ("whole", "killed"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**values, "output_dir": str(tmp_path / name)}))
    begun = subprocess.Popen([*_GYM, "train", str(tmp_path / "killed.yaml")], stderr=subprocess.DEVNULL)
    while begun.poll() is None and not list((tmp_path / "killed/checkpoints").glob("checkpoint-*")):
        time.sleep(0.01)
    begun.send_signal(signal.SIGKILL)
    assert begun.wait(SECONDS) == -signal.SIGKILL, "it was killed before its end"
    assert not (tmp_path / "killed/adapter_model.safetensors").exists()
    for name, more in (("killed", ["--resume"]), ("whole", [])):
        done = [*_GYM, "train", str(tmp_path / f"{name}.yaml"), *more]
        subprocess.run(done, check=True, capture_output=True)
    whole, killed, start = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "killed", "sft")
    )
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert any(not torch.equal(whole[name], start[name]) for name in whole)
