"""The table of what runs where names everything that can be named in a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gym_fed.config.distributed import DistributedSettings
from gym_fed.kinds import ALGORITHMS, FEATURES, GRADERS, OPTIMIZERS, TRACKERS, TUNING

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text(encoding="utf-8")
STRATEGIES = list(get_args(DistributedSettings.model_fields["strategy"].annotation))


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("algorithm", ALGORITHMS.own()),
        ("finetuning", TUNING.own()),
        ("optimizer", OPTIMIZERS.own()),
        ("feature", FEATURES.own()),
        ("distributed.strategy", STRATEGIES),
        ("grader", GRADERS.names()),
        ("tracking", [name for name in TRACKERS.names() if name not in ("jsonl", "tensorboard")]),
    ],
)
def test_every_name_has_a_row(title: str, names: list[str]) -> None:
    table = re.search(rf"^\| `?{re.escape(title)}`? \|.*?(?=^$)", PAGE, re.MULTILINE | re.DOTALL)
    assert table, f"no table of {title}"
    said = set(re.findall(r"`([a-z0-9_]+)", table[0]))
    assert set(names) <= said, f"missing: {sorted(set(names) - said)}"
