"""Training, a round of a federation and an answer of the server where Python has nothing that Windows lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.like_windows import LIKE_WINDOWS
from tests.support.one_round import ONE_ROUND
from tests.support.wait import SECONDS

PROGRAMS = {"gym": "gym_fed", "gym-server": "gym_server", "gym-client": "gym_client"}
ENVIRONMENT = {**os.environ, **LIKE_WINDOWS, "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.slow  # six fresh processes, each of which loads torch


def words(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{PROGRAMS[program]}.cli.main", *arguments, "--json"]


def run(folder: Path, program: str, *arguments: str) -> Any:
    """Of ``--json`` the document, or the last one of its lines."""
    done = subprocess.run(
        words(program, *arguments),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=3 * SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    return json.loads(lines[-1] if lines[-1].startswith("{") else done.stdout)


@contextmanager
def server(folder: Path, program: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """A command that prints a line of JSON when it listens, and ends well: `gym` by SIGTERM, a hub when it is done."""
    with (folder / f"{program}.log").open("w+") as log:
        process = subprocess.Popen(
            words(program, *arguments),
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (folder / f"{program}.log").read_text()[-4000:]
            yield json.loads(line)
            if program == "gym":
                process.terminate()
            status = process.wait(timeout=SECONDS)
            assert status == 0, (folder / f"{program}.log").read_text()[-4000:]
        finally:
            process.kill()
            process.wait()


def test_the_lacking_is_really_lacking() -> None:
    code = "import os, signal; print(hasattr(os, 'fork'), hasattr(signal, 'SIGKILL')); import fcntl"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
    assert "ModuleNotFoundError: No module named 'fcntl'" in done.stderr


def test_gym_nano_trains_two_steps_and_is_served(tmp_path: Path) -> None:
    run(tmp_path, "gym", "data", "generate", "--task", "double", "--num", "16", "rows.jsonl")
    trained = run(
        tmp_path,
        "gym",
        *("train", "--model", "gym-nano", "--data", "rows.jsonl", "--max-steps", "2"),
        *("--set", "output_dir=run", "--set", "device=cpu"),
    )
    assert trained["steps"] == 2
    assert (tmp_path / "run" / "model.safetensors").stat().st_size > 10_000
    key = run(tmp_path, "gym", "api", "keys", "add", "me", "--file", "keys.json")["key"]
    words = ("api", "serve", "--base", "run", "--port", "0", "--api-keys", "keys.json", "--set", "device=cpu")
    with server(tmp_path, "gym", *words) as event:
        answer = httpx.post(
            f"{event['url']}/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={
                "model": event["model"],
                "messages": [{"role": "user", "content": "double: ab"}],
                "max_tokens": 4,
            },
            timeout=SECONDS,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0


def test_a_contributor_joins_a_hub_for_a_round(tmp_path: Path) -> None:
    run(tmp_path, "gym-server", "init", "--dir", "hub", "--enrolment", "open", "--base", "gym-nano")
    run(tmp_path, "gym", "data", "generate", "--task", "double", "--num", "16", "rows.jsonl")
    with server(tmp_path, "gym-server", "run", "--dir", "hub", "--exit-when-done", *ONE_ROUND) as event:
        joined = run(
            tmp_path,
            "gym-client",
            *("join", "--server", f"127.0.0.1:{event['port']}", "--data", "rows.jsonl", "--rounds", "1"),
            *("--home", "home", "--yes", "--device", "cpu"),
        )
        assert joined["num_submitted"] == 1
    assert "committed" in json.dumps(run(tmp_path, "gym-server", "rounds", "--dir", "hub"))
    assert run(tmp_path, "gym-server", "ledger", "verify", "--dir", "hub")
