"""The texts for schedulers, and the address at which machines meet."""

from __future__ import annotations

import shlex
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import SCHEDULERS
from gym_fed.training.launch.base import ClusterJob
from gym_fed.training.processes.ranks import Machines, _join, launch
from tests.support.in_process import run_here

HOSTILE = 'a b\'; rm -rf "$HOME" #.yaml'


def job(tmp_path: Path, *, nodes: int = 2, device: str = "auto", file: str = HOSTILE) -> ClusterJob:
    config = TrainingConfig(
        model="gym-nano",
        data=[{"tasks": ["double"], "num_examples": 8}],
        output_dir=tmp_path / "Run_1",
        device=device,
    )
    path = tmp_path / file
    path.write_text("model: gym-nano\n", encoding="utf-8")
    return ClusterJob(config, path, ["learning_rate=1e-3", "tracker.name=it's", "--no-check"], nodes, 8)


def words_after(prefix: str, text: str) -> list[str]:
    """The words of the command's line, as a shell reads them."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(prefix)]
    return shlex.split(line.strip().removesuffix("&"))


def test_slurm_quotes_every_word_and_asks_for_a_gpu_per_process(tmp_path: Path) -> None:
    text = SCHEDULERS.new("slurm").text(job(tmp_path))
    words = words_after("srun", text)
    assert words[2:5] == ["gym", "train", str(tmp_path / HOSTILE)]
    assert words[words.index("--set") + 1] == "learning_rate=1e-3"
    assert "tracker.name=it's" in words
    assert words[words.index("--no-check") - 1] == "tracker.name=it's"
    assert words[-6:] == ["--nnodes", "2", "--nproc", "8", "--rdzv-endpoint", "$head:29500"]
    assert "#SBATCH --gpus-per-node=8" in text
    assert "--signal=B:TERM@300" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_run_on_cpus_asks_for_no_gpu(tmp_path: Path) -> None:
    assert "gpus" not in SCHEDULERS.new("slurm").text(job(tmp_path, device="cpu"))
    jobset = list(yaml.safe_load_all(SCHEDULERS.new("jobset").text(job(tmp_path, device="cpu"))))[1]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": 8}
    assert "accelerators" not in SCHEDULERS.new("skypilot").text(job(tmp_path, device="cpu"))


def test_pods_of_a_job_set_meet_at_its_first_one(tmp_path: Path) -> None:
    made = job(tmp_path)
    config, jobset = yaml.safe_load_all(SCHEDULERS.new("jobset").text(made))
    assert config["data"]["train.yaml"] == made.file.read_text(encoding="utf-8")
    job_spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job_spec["parallelism"] == job_spec["completions"] == 2
    container = job_spec["template"]["spec"]["containers"][0]
    assert container["command"][-2:] == ["--rdzv-endpoint", "gym-run-1-node-0-0.gym-run-1:29500"]
    assert container["command"][:3] == ["gym", "train", "/config/train.yaml"]


def test_sky_pilot_runs_the_command_that_slurm_runs(tmp_path: Path) -> None:
    made = job(tmp_path)
    task = yaml.safe_load(SCHEDULERS.new("skypilot").text(made))
    assert task["num_nodes"] == 2
    assert (
        words_after("gym train", task["run"]) == words_after("srun", SCHEDULERS.new("slurm").text(made))[2:]
    )


@pytest.mark.parametrize("name", ["slurm", "jobset", "skypilot"])
def test_one_machine_meets_nobody(tmp_path: Path, name: str) -> None:
    assert "rdzv" not in SCHEDULERS.new(name).text(job(tmp_path, nodes=1))


@pytest.mark.parametrize(
    ("folder", "name"), [("Run_1", "gym-run-1"), ("é" * 90, "gym"), ("a" * 90, f"gym-{'a' * 36}")]
)
def test_names_of_jobs_are_labels(tmp_path: Path, folder: str, name: str) -> None:
    made = job(tmp_path)
    moved = made.config.model_copy(update={"output_dir": tmp_path / folder})
    assert replace(made, config=moved).name == name


@pytest.mark.parametrize(
    ("endpoint", "host", "port", "text"),
    [
        ("10.0.0.1:29500", "10.0.0.1", 29500, "10.0.0.1:29500"),
        ("node-1:80", "node-1", 80, "node-1:80"),
        ("[fd00::1]:29500", "fd00::1", 29500, "[fd00::1]:29500"),
    ],
)
def test_the_address_of_a_machine_is_read(endpoint: str, host: str, port: int, text: str) -> None:
    machines = Machines.parse(2, endpoint)
    assert (machines.host, machines.port, machines.endpoint) == (host, port, text)


@pytest.mark.parametrize(
    ("count", "endpoint"),
    [(2, None), (2, "host"), (2, ":29500"), (2, "host:0"), (2, "host:x"), (1, "host:1")],
)
def test_an_address_that_cannot_be_used_is_refused(count: int, endpoint: str | None) -> None:
    with pytest.raises(GymError) as raised:
        Machines.parse(count, endpoint)
    assert raised.value.code is ErrorCode.USAGE
    assert raised.value.hint


def test_the_machine_of_the_address_knows_itself() -> None:
    assert Machines.parse(2, "127.0.0.1:29500").here().address == "127.0.0.1"
    assert Machines().here().address == "127.0.0.1"


def test_the_store_of_a_run_on_one_machine_is_reached_from_this_machine_alone() -> None:
    store, number = _join(Machines(), Machines().here())
    (listening,) = [
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    ]
    assert (listening, number) == ("127.0.0.1", 0)


def test_machines_are_numbered_as_they_arrive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machines = Machines.parse(3, f"127.0.0.1:{port}")
    joined = [_join(machines, machines.here()) for _ in range(3)]
    assert [number for _, number in joined] == [0, 1, 2]


def test_no_rendezvous_that_unpickles_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []

    def launched(config: Any, *_: object) -> Any:
        backends.append(config.rdzv_backend)
        return lambda *_: None

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launched)
    assert launch(["train"], 2) == 0
    assert backends == ["static"]


def test_a_name_of_this_machine_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(2, 2, 17, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(GymError, match="a loopback address"):
        Machines.parse(2, "my-host:29500").here()


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(GymError) as raised:
        Machines.parse(2, "no-such-host.invalid:29500").here()
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert "10.0.0.1:29500" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan"], "--launch slurm cannot be combined with --plan"),
        (["--overwrite"], "--launch slurm cannot be combined with --overwrite"),
        (["--json"], "--launch slurm cannot be combined with --json"),
        (["--rdzv-endpoint", "host:1"], "--launch slurm cannot be combined with --rdzv-endpoint"),
    ],
)
def test_options_that_a_scheduler_would_not_run_are_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    ended = run_here(["gym", "train", str(config_file(tmp_path)), "--launch", "slurm", *options])
    assert ended.returncode == ErrorCode.USAGE.exit_code
    assert message in ended.stderr


def test_options_of_the_run_reach_the_scheduler_and_a_finished_run_does_not(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    words = ["gym", "train", str(file), "--launch", "slurm", "--no-check", "--no-resume", "--yes"]
    ended = run_here(words)
    assert ended.returncode == 0, ended.stderr
    assert "--no-check --no-resume --yes --nnodes 1 --nproc 1" in ended.stdout
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text("{}")
    again = run_here(words)
    assert again.returncode == ErrorCode.FILE_EXISTS.exit_code
    assert "holds a finished run" in again.stderr


def config_file(folder: Path) -> Path:
    file = folder / "run.yaml"
    file.write_text(
        f"model: gym-nano\ndata: [{{tasks: [double], num_examples: 8}}]\noutput_dir: {folder / 'run'}\n",
        encoding="utf-8",
    )
    return file
