"""A small crowd against a real hub: its rounds are committed, and nothing that was acknowledged is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.wait import SECONDS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow  # a hub and its crowd, for two rounds


def test_a_crowd_of_eight_commits_its_rounds_and_every_receipt_is_in_the_ledger() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "crowd.py", "--members", "8", "--rounds", "2"]
    more = ["--think", "0.5", "--core", "-1", "--json"]
    done = subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=10 * SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    aims = {aim["name"]: aim for aim in report["aims"]}
    for name in ("rounds committed", "acknowledged updates lost", "credits paid beyond the pools"):
        assert aims[name]["met"], aims[name]
    assert report["figures"]["calls"] > 50
    assert report["figures"]["credits_paid"] == 2000
