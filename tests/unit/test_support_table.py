"""The table of what runs where names everything that can be named in a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gym_fed.config.distributed import DistributedSettings
from gym_fed.evaluation.graders.registry import grader_names
from gym_fed.tracking.trackers.registry import tracker_names
from gym_fed.training.algorithms.registry import algorithm_names
from gym_fed.training.features.registry import feature_names
from gym_fed.training.optimizers.registry import optimizer_names
from gym_fed.training.tuning.registry import tuning_names

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text(encoding="utf-8")
STRATEGIES = list(get_args(DistributedSettings.model_fields["strategy"].annotation))


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("algorithm", algorithm_names()),
        ("finetuning", tuning_names()),
        ("optimizer", optimizer_names()),
        ("feature", feature_names()),
        ("distributed.strategy", STRATEGIES),
        ("grader", grader_names()),
        ("tracking", [name for name in tracker_names() if name not in ("jsonl", "tensorboard")]),
    ],
)
def test_every_name_has_a_row(title: str, names: list[str]) -> None:
    table = re.search(rf"^\| `?{re.escape(title)}`? \|.*?(?=^$)", PAGE, re.MULTILINE | re.DOTALL)
    assert table, f"no table of {title}"
    said = set(re.findall(r"`([a-z0-9_]+)", table[0]))
    assert set(names) <= said, f"missing: {sorted(set(names) - said)}"
