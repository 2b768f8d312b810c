"""`gym models pull` and `gym train` against a Hub on loopback, as real processes that are killed and go on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.model_hub import ModelHub, Repo
from tests.support.wait import SECONDS

NAME = "acme/tiny-chat"
WEIGHTS = "model.safetensors"
_MAIN = "from gym_fed.cli.main import main; main()"


def _start(hub: ModelHub, home: Path, *words: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _part(hub: ModelHub, home: Path) -> int:
    """Bytes of the weights' part that are on the disk."""
    digest = hashlib.sha256(hub.repos[NAME].files[WEIGHTS]).hexdigest()
    part = home / f"hub/models--acme--tiny-chat/blobs/{digest}.incomplete"
    return part.stat().st_size if part.exists() else 0


def _stop_within(hub: ModelHub, home: Path, number: signal.Signals) -> tuple[int, str]:
    """Start a pull and send ``number`` while the weights come; the exit status and standard error."""
    process = _start(hub, home, "models", "pull", NAME, "--yes")
    before = _part(hub, home)
    deadline = time.monotonic() + 120
    while _part(hub, home) < before + 4000:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, text = process.communicate(timeout=SECONDS)
    return process.returncode, text


@pytest.mark.slow  # four processes; tests/unit/downloads interrupts one too
def test_a_pull_that_is_killed_and_interrupted_goes_on_at_the_byte(tiny_base: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    repo = Repo.of(tiny_base)
    with ModelHub({NAME: repo}) as hub:
        repo.pause = 0.1
        assert _stop_within(hub, home, signal.SIGKILL)[0] == -signal.SIGKILL
        killed_at = _part(hub, home)
        assert 0 < killed_at < len(repo.files[WEIGHTS])
        status, text = _stop_within(hub, home, signal.SIGINT)
        assert status == 130
        assert "run the same command again to resume" in text
        stopped_at = _part(hub, home)
        repo.pause = 0.0
        process = _start(hub, home, "models", "pull", NAME, "--yes", "--json")
        out, text = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, text
        assert hub.gets(WEIGHTS) == [None, f"bytes={killed_at}-", f"bytes={stopped_at}-"]
        assert _part(hub, home) == 0
    folder = Path(json.loads(out)["folder"])
    assert (folder / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


@pytest.mark.slow  # five processes that import torch
def test_train_by_a_name_of_the_hub_needs_consent_then_fetches_and_trains(
    tiny_base: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "completion": "2"}\n' * 4)
    config = tmp_path / "train.yaml"
    config.write_text(
        f"model: {NAME}\ndata: [{{path: {rows}}}]\noutput_dir: {tmp_path / 'run'}\nmax_steps: 1\nfinetuning: lora\n"
    )
    with ModelHub({NAME: Repo.of(tiny_base, card={"license": "mit"})}) as hub:
        process = _start(hub, tmp_path / "home", "train", str(config))
        _, text = process.communicate(timeout=SECONDS)
        assert process.returncode == 31, text
        assert "licence: mit" in text
        assert "--yes" in text
        assert not (tmp_path / "run").exists()
        process = _start(hub, tmp_path / "home", "train", str(config), "--yes", "--json")
        out, text = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, text
        assert json.loads(out)["steps"] == 1
        assert len(hub.gets(WEIGHTS)) == 1
