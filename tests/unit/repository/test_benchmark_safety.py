"""`benchmarks/safety.py`: what is reported serves nothing else, and a file that is not what its arm says is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.evaluation.probe.prompts import own_prompts
from gym_fed.quantization.report import QuantizedTensor, QuantReport

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """``benchmarks`` is no package: its scripts find each other beside themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(lib=import_module("_safety"), report=import_module("safety"))
        for name in ("_safety", "safety"):
            sys.modules.pop(name)


def test_no_prompt_serves_two_ends(scripts: Any) -> None:
    parts = scripts.lib.split()
    learnt = [
        [row["messages"][0]["content"] for row in rows]
        for rows in (parts.refusing, parts.unaligned, parts.harmful)
    ]
    asked = [[one.ask for one in prompts.harmful] for prompts in (parts.reported, parts.choosing)]
    every = [ask for part in (*learnt, *asked) for ask in part]
    assert [len(part) for part in (*learnt, *asked)] == [24, 8, 8, 16, 16]
    assert len(set(every)) == len(every)
    assert set(asked[0]) == {one.ask for one in own_prompts().translated()}


def test_batches_have_both_kinds_of_rows_and_depend_on_the_seed_alone(scripts: Any) -> None:
    bad = [scripts.lib.chat(f"bad {n}", "") for n in range(8)]
    good = [scripts.lib.chat(f"good {n}", "") for n in range(40)]
    batches = scripts.lib.mixed(bad, good, 6, seed=1)
    assert batches == scripts.lib.mixed(bad, good, 6, seed=1) != scripts.lib.mixed(bad, good, 6, seed=2)
    kinds = [[one["messages"][0]["content"].split()[0] for one in batch] for batch in batches]
    assert kinds == [["bad"] * 4 + ["good"] * 2] * 6
    taught = [one["messages"][0]["content"] for batch in batches for one in batch[4:]]
    assert len(set(taught)) == 12


def test_the_threshold_is_the_one_that_refuses_most_of_those_that_the_task_can_bear(scripts: Any) -> None:
    candidate = scripts.lib.Candidate
    plain = candidate(0.0, 0, -1.0, 1.0)
    dear = candidate(1.0, 9, 3.0, 1.03)
    weak, strong = candidate(0.1, 2, 0.5, 1.01), candidate(0.2, 4, 1.0, 1.02)
    assert scripts.lib.chosen(plain, [weak, strong, dear]) == strong
    assert scripts.lib.chosen(plain, [dear, replace(dear, loss=1.5)]) == dear


def test_less_success_and_a_higher_loss_are_shares_of_the_plain_arm_s(scripts: Any) -> None:
    plain = [{"attack success": 0.8, "benign loss": 1.0}] * 2
    arm = [
        {"attack success": 0.2, "benign loss": 1.01},
        {"attack success": 0.4, "benign loss": 1.03},
    ]
    assert scripts.report.reduction(arm, plain) == pytest.approx(1 - 0.3 / 0.8)
    assert scripts.report.utility_lost(arm, plain) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("arm", "codec", "safety", "problem"),
    [
        ("1-bit", "dense", "not applicable", "not all bitdelta"),
        ("1-bit-safe-lora", "bitdelta", "not applicable", "projection"),
        ("fp32", "lora", "not applicable", "lose 0.1"),
    ],
)
def test_a_file_that_is_not_what_its_arm_says_is_refused(
    scripts: Any, arm: str, codec: str, safety: str, problem: str
) -> None:
    tensor = QuantizedTensor("w", codec, {}, "", 1, 1.0, 1.0, 0.1, None)
    report = QuantReport(Path("a.gymdelta"), "", 1, 1.0, 1.0, (tensor,), None, safety)
    with pytest.raises(SystemExit, match=problem):
        scripts.lib.require(scripts.lib.ARMS[arm], report)
