"""The table of what runs where names everything that can be named in a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gym_fed.config.distributed import DistributedSettings
from gym_fed.kinds import ALGORITHMS, CHECKS, FEATURES, FORMATS, GRADERS, OPTIMIZERS, TRACKERS, TUNING

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "support.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("data.md", FORMATS.own()),
        ("graders.md", GRADERS.own()),
        ("doctor.md", [name.removesuffix("s") for name in CHECKS.own()]),
    ],
)
def test_the_page_of_a_kind_names_every_member(page: str, names: list[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    missing = [name for name in names if not re.search(rf"`\[?{name}", text)]
    assert missing == []
