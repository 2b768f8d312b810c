"""Two processes of a run: the first reads and encodes, the second maps its files; an error reaches both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.processes.group import in_steps

CODE = """
import json, os, sys
from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.compute import DistributedSettings
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import source_store
from gym_fed.training.processes import group
from gym_fed.training.rows import encode_part
from gym_fed.training.rows.run_rows import encode_run, rows_of_run
import torch

def refused(*arguments):
    raise AssertionError("the second process reads or encodes")

source_store.MAX_MEMORY_BYTES, group._STEP_SECONDS = 0, 0.0
if os.environ["RANK"] == "1":
    source_store.source_rows = encode_part.rows_to_encode = refused
group.start(DistributedSettings(), torch.device("cpu"))
config = TrainingConfig(
    model="gym-nano", data=[{"path": sys.argv[1]}], output_dir=sys.argv[1] + "-run", max_length=64, packing=True
)
try:
    rows = rows_of_run(config, None, None)
    encoded = encode_run(config, ALGORITHMS.new("sft"), load_tokenizer("gym-nano"), *rows)
    print(json.dumps([len(rows[0]), list(encoded.encoded)[-1], encoded.digests, encoded.counts.facts()]))
except GymError as error:
    print(json.dumps(error.message))
torch.distributed.destroy_process_group()
"""


def both(file: Path) -> list[object]:
    """What each of two processes prints."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for rank in ("0", "1"):
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GYM_HOME": str(file.parent / "home"),
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", CODE, str(file)],
                env={**os.environ, **group, **address},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.slow
def test_the_second_process_maps_what_the_first_has_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in generate("copy", 1200)))
    first, second = both(file)
    assert first == second
    assert isinstance(first, list)
    assert first[0] == 1200
    file.write_text(file.read_text() + '{"messages": []}\n')
    first, second = both(file)
    assert first == second
    assert isinstance(first, str)
    assert "rows.jsonl:1201" in first


def test_one_process_exhausts_the_work_and_raises_its_error() -> None:
    done = []

    def work(*, fails: bool) -> Iterator[int]:
        for number in range(3):
            done.append(number)
            yield number
        if fails:
            raise GymError(ErrorCode.DATA_INVALID, "a bad row")

    in_steps(lambda: work(fails=False))
    assert done == [0, 1, 2]
    with pytest.raises(GymError, match="a bad row"):
        in_steps(lambda: work(fails=True))
