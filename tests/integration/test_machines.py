"""Two network namespaces stand for two machines that share a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import SCHEDULERS
from gym_fed.training.launch.base import ClusterJob
from tests.integration.test_processes import CONFIG, TOLERANCE, command, far
from tests.support.quick import quick
from tests.support.wait import SECONDS, until

LONG = CONFIG.replace("max_steps: 6", "max_steps: 4000")
GYM = [sys.executable, "-m", "gym_fed.cli.main", "train"]


class Machine(NamedTuple):
    """A network namespace and its address."""

    name: str
    address: str


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces that see each other through a pair of virtual network cards, and nothing else."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the command ip and the rights of root")
    first, second = Machine(f"gym{os.getpid()}a", "10.213.7.1"), Machine(f"gym{os.getpid()}b", "10.213.7.2")

    def do(*words: str) -> bool:
        return subprocess.run([ip, *words], capture_output=True, check=False).returncode == 0

    try:
        if not (do("netns", "add", first.name) and do("netns", "add", second.name)):
            pytest.skip("the system refuses network namespaces")
        assert do(
            "link", "add", "c0", "netns", first.name, "type", "veth", "peer", "c1", "netns", second.name
        )
        for machine, card in ((first, "c0"), (second, "c1")):
            assert do("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", card)
            for device in (card, "lo"):
                assert do("-n", machine.name, "link", "set", device, "up")
        yield first, second
    finally:
        for machine in (first, second):
            do("netns", "del", machine.name)


class Runs:
    """The command of a run on both machines; leaves no process behind."""

    def __init__(self, machines: tuple[Machine, Machine], words: list[str], logs: Path) -> None:
        self.logs = [logs / f"{machine.name}.log" for machine in machines]
        meeting = ["--nnodes", "2", "--rdzv-endpoint", f"{machines[0].address}:29500"]
        self.started = []
        for machine, log in zip(machines, self.logs, strict=True):
            with log.open("w") as file:
                inside = ["ip", "netns", "exec", machine.name, *words, *meeting]
                self.started.append(subprocess.Popen(inside, stdout=file, stderr=subprocess.STDOUT))

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            for child in [*_children(process.pid), process]:
                child.kill()
            process.wait(SECONDS)

    def wait(self) -> list[int]:
        return [process.wait(SECONDS) for process in self.started]

    def texts(self) -> list[str]:
        return [log.read_text(errors="replace") for log in self.logs]

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank."""
        found = {}
        for process in self.started:
            for child in _children(process.pid):
                try:
                    if "RANK" in (variables := child.environ()):
                        found[int(variables["RANK"])] = child
                except psutil.Error:
                    continue
        return found


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True) if psutil.pid_exists(pid) else []


def words_for(folder: Path, config: str = CONFIG, *settings: str) -> list[str]:
    file = folder.parent / "machines.yaml"
    file.write_text(config, encoding="utf-8")
    sets = [part for word in (f"output_dir={folder}", *settings) for part in ("--set", word)]
    return [*GYM, str(file), "--no-check", *sets]


@pytest.mark.parametrize("strategy", quick(["ddp", "fsdp2"]))
def test_two_machines_give_the_weights_of_one(
    strategy: str, machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    alone = subprocess.run(
        command(tmp_path / "alone", 1, []), capture_output=True, timeout=SECONDS, check=False
    )
    assert alone.returncode == 0
    settings = ("per_device_train_batch_size=4", f"distributed.strategy={strategy}")
    with Runs(machines, [*words_for(tmp_path / "run", CONFIG, *settings), "--json"], tmp_path) as runs:
        assert runs.wait() == [0, 0], runs.texts()
        printed = next(text for text in runs.texts() if "num_processes" in text)
    assert json.loads(printed[printed.index("{") : printed.rindex("}") + 1])["num_processes"] == 2
    assert far(tmp_path / "run", tmp_path / "alone") < TOLERANCE


def _in_training(runs: Runs) -> bool:
    return any("step 1/" in text for text in runs.texts())


@pytest.mark.parametrize(
    "moment", quick([lambda runs: len(runs.ranks()) == 2, _in_training]), ids=["joining", "training"]
)
def test_the_end_of_one_process_ends_the_run_on_both_machines_with_the_reason(
    moment: Callable[[Runs], bool], machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    with Runs(machines, words_for(tmp_path / "run", LONG), tmp_path) as runs:
        until(lambda: moment(runs))
        runs.ranks()[1].send_signal(signal.SIGKILL)
        assert 0 not in runs.wait()
        texts = runs.texts()
    assert any("process 1 was ended by signal 9" in text for text in texts), texts
    other = next(text for text in texts if "ended by signal 9" not in text)
    assert "error (unavailable)" in other
    assert "Traceback" not in "".join(texts)


@pytest.mark.slow
def test_machines_that_do_not_meet_say_where(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    words = [*words_for(tmp_path / "run"), "--nnodes", "2", "--rdzv-endpoint", f"{machines[1].address}:29500"]
    program = "import gym_fed.training.processes.ranks as r, gym_fed.cli.main as m; r._RENDEZVOUS_SECONDS = 3; m.main()"
    alone = ["ip", "netns", "exec", machines[0].name, sys.executable, "-c", program, *words[3:]]
    ended = subprocess.run(alone, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 14 or "error (unavailable)" in ended.stderr, ended.stderr
    assert f"2 machines did not meet at {machines[1].address}:29500" in ended.stderr


@pytest.mark.slow
def test_the_script_for_slurm_writes_a_checkpoint_before_the_time_limit_and_queues_the_job_again(
    tmp_path: Path,
) -> None:
    """Slurm's commands are stand-ins here: srun runs the command once for each machine."""
    file = tmp_path / "run.yaml"
    file.write_text(LONG + f"output_dir: {tmp_path / 'run'}\n", encoding="utf-8")
    config = TrainingConfig(
        model="gym-nano",
        data=[{"tasks": ["double"], "num_examples": 8}],
        output_dir=tmp_path / "run",
        device="cpu",
    )
    script = tmp_path / "job.sh"
    script.write_text(SCHEDULERS.new("slurm").text(ClusterJob(config, file, (), 2, 1)), encoding="utf-8")
    programs = {
        "scontrol": f'[ "$2" = hostnames ] && echo 127.0.0.1 || echo "$@" >> {tmp_path}/asked',
        "srun": 'shift\ntrap \'kill -TERM $a $b\' TERM\n"$@" & a=$!\n"$@" & b=$!\nwait; wait $a; wait $b',
        "gym": f'exec {sys.executable} -m gym_fed.cli.main "$@" --no-check',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "7",
    }
    log = tmp_path / "log"
    with log.open("w") as output:
        started = subprocess.Popen(["bash", str(script)], env=variables, stdout=output, stderr=output)
    try:
        until(lambda: "step 2/" in log.read_text(errors="replace") or started.poll() is not None)
        started.send_signal(signal.SIGTERM)
        assert started.wait(SECONDS) == 128 + signal.SIGTERM, log.read_text()
    finally:
        for child in [*_children(started.pid), started]:
            child.kill()
    assert "a checkpoint is in" in log.read_text()
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
