"""Parsers return a value or raise ``GymError`` for any bytes, within limits on time and memory.

The quick suite tries seeded mutations; ``make fuzz`` searches by coverage for a minute each (docs/fuzzing.md).
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from gym_fed.core.errors import GymError
from tests.fuzz.mutation import mutations
from tests.fuzz.run import ROOT, once
from tests.fuzz.targets import TARGETS

COUNT = {
    "tokenizer": 40,
    "gguf": 100,
    "backup": 150,
    "hub_yaml": 40,
    "run_yaml": 60,
    "delta": 200,
    "ledger": 60,
}
MOST_SECONDS = 10.0
MOST_GROWTH_KB = 1 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_of_a_target_is_read_without_a_refusal(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].read(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_end_in_a_value_or_a_refusal_within_time_and_memory(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    once(name, seeds[0])  # libraries are imported before memory is measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for data in mutations(seeds, COUNT.get(name, 300), target.max_bytes, target.mutate):
        began = time.process_time()
        try:
            target.read(data)
        except GymError:
            refused += 1
        except BaseException as error:
            error.add_note(f"{name}: {data[:2000]!r}")
            raise
        assert time.process_time() - began < MOST_SECONDS, data[:2000]
    assert refused > 0, "mutations that are all accepted test nothing"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH_KB


def test_a_finding_of_the_coverage_guided_runner_fails_and_is_kept(tmp_path: Path) -> None:
    if find_spec("atheris") is None:
        pytest.skip("atheris is not installed; make fuzz installs it")
    script = (
        "import sys; from tests.fuzz import run, targets\n"
        "def read(data):\n    assert data[:1] != b'!'\n"
        "targets.TARGETS['invite'] = targets.Target(lambda: [b'a'], read, ('gym_fed.trust.identity',))\n"
        f"run.ROOT = __import__('pathlib').Path({str(tmp_path)!r})\n"
        "sys.argv = ['run', 'invite', '--seconds', '20']\nrun.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    (kept,) = (tmp_path / "build" / "fuzz" / "invite").glob("crash-*")
    assert kept.read_bytes()[:1] == b"!"
