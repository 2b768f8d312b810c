"""A run belongs to as many processes as began it, and one of several speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.processes.sharding import check_distributed, deepspeed_config, is_sharded_at_loading
from gym_fed.training.run.folder import FolderLock, RunFolder


def test_another_number_of_processes_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainingConfig(model="gym-nano", output_dir=tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    begun = RunFolder(config.output_dir)
    begun.open(config, "digest", resume=True)
    with pytest.raises(GymError, match=rf"another process \({os.getpid()}\) is using") as locked:
        RunFolder(config.output_dir).open(config, "digest", resume=True)
    assert locked.value.code is ErrorCode.STATE_LOCKED
    with pytest.raises(GymError, match="is using it"):
        RunFolder(config.output_dir).delete()
    begun.close()
    assert json.loads((tmp_path / "run/run.json").read_text())["num_processes"] == 2
    again = RunFolder(config.output_dir)
    again.open(config, "digest", resume=True)
    again.close()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(GymError, match="unfinished run with 2 processes, but now there are 1") as caught:
        RunFolder(config.output_dir).open(config, "digest", resume=True)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert "resume with 2 processes, or with 16 rows per step" in caught.value.hint
    moved = config.model_copy(update={"per_device_train_batch_size": 16})
    RunFolder(config.output_dir).check(moved, "digest", resume=True)
    with pytest.raises(GymError, match="per_device_train_batch_size was 8 and is now 12"):
        RunFolder(config.output_dir).check(
            config.model_copy(update={"per_device_train_batch_size": 12}), "digest", resume=True
        )


def test_a_killed_process_frees_its_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gym_fed.training.run.folder import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(GymError, match=rf"another process \({holder.pid}\) is using"):
            FolderLock(tmp_path)
        holder.kill()
    FolderLock(tmp_path).release()


def test_deepspeed_trains_in_the_precision_asked_for_and_never_goes_back(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    split = {"strategy": "deepspeed"}
    for given in ({"mixed_precision": "bf16"}, {"dtype": "bfloat16"}):
        config = TrainingConfig(model="gym-nano", output_dir=tmp_path, distributed=split, **given)
        assert deepspeed_config(config)["bf16"] == {"enabled": True}
        assert deepspeed_config(config)["fp16"] == {"enabled": False}
    config = TrainingConfig(
        model="gym-nano", output_dir=tmp_path, distributed=split, loss_spikes={"rollback": True}, save_steps=1
    )
    with pytest.raises(GymError, match="cannot return to a checkpoint"):
        check_distributed(config, 2)


@pytest.mark.parametrize("strategy", ["fsdp2", "tensor_parallel"])
def test_a_single_process_splits_no_model_at_loading(strategy: str) -> None:
    config = TrainingConfig(model="gym-nano", distributed={"strategy": strategy})
    assert not is_sharded_at_loading(config)


def test_a_layer_split_over_processes_gets_no_adapter(tmp_path: Path) -> None:
    config = TrainingConfig(
        model="gym-nano",
        output_dir=tmp_path,
        finetuning="lora",
        distributed={"strategy": "tensor_parallel"},
    )
    with pytest.raises(
        GymError, match="tensor_parallel splits the layers, but PEFT's layers for lora expect whole ones"
    ):
        check_distributed(config, 2)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_of_a_run_prints_its_error(rank: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: gym-nano\ndata: [{path: missing.jsonl}]\noutput_dir: run\n")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "gym_fed.cli.main", "train", "config.yaml"],
        env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    assert "no data file at missing.jsonl" in ended.stderr
