"""The lines of `make test-gpu` without a GPU: each runs on the CPU, or ends in a refusal that names what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.check import Check
from tools.gpu.checks import CHECKS
from tools.gpu.page import section, written

ROOT = Path(__file__).parents[2]
RUNS = [check for check in CHECKS if check.on_cpu is None]
PROCESSES = ("`gym api`", "a federated round")


@pytest.mark.few(4, "one runner for every check")
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check,
            id=check.name,
            marks=[pytest.mark.slow] if check.name in PROCESSES else [],  # servers of their own: a minute
        )
        for check in RUNS
    ],
)
def test_a_check_runs_on_the_cpu(check: Check, tmp_path: Path) -> None:
    assert check.run("cpu", tmp_path)


@pytest.mark.parametrize("check", [pytest.param(c, id=c.name) for c in CHECKS if c.on_cpu is not None])
def test_what_needs_a_gpu_is_refused_by_name(check: Check, tmp_path: Path) -> None:
    assert check.on_cpu is not None
    with pytest.raises(Exception, match=check.on_cpu) as refused:
        check.run("cpu", tmp_path)
    assert type(refused.value).__name__ in ("GymError", "CodecError")


def test_without_a_gpu_the_command_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no CUDA GPU" in done.stderr


def test_the_page_has_a_row_for_every_check() -> None:
    page = written()
    assert [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")][1:] == [
        f"| {check.name}" for check in CHECKS
    ]
    if page.startswith("No line"):
        assert page == section("", {})


def test_what_was_seen_stands_in_the_row_of_its_check() -> None:
    text = section("a GPU, torch 2", {"GRPO": "two steps"})
    assert "Tried on a GPU, torch 2." in text
    assert next(line for line in text.splitlines() if line.startswith("| GRPO")).endswith("| two steps |")
