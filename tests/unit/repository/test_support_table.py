"""`gym docs members` has every registered name; the pages of the guides name what a config can name besides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from gym_fed.cli.docs import members_page
from gym_fed.config.train.compute import DistributedSettings
from gym_fed.core.registries import ALGORITHMS, ALL, CHECKS, FORMATS, GRADERS, TRACKERS, TUNING
from gym_fed.training.algorithms.sft import Sft

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "support.md").read_text(encoding="utf-8")
STRATEGIES = list(get_args(DistributedSettings.model_fields["strategy"].annotation))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.kind)
def test_the_page_of_the_members_has_a_row_for_each(kind: Any) -> None:
    rows = members_page()
    assert [name for name in kind.own() if f"| `{name}` | " not in rows] == []


def test_a_fact_that_changes_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sft, "tried", "nothing")
    assert "| nothing |" in members_page()


def test_every_algorithm_and_tuning_method_says_what_was_tried() -> None:
    for kind in (ALGORITHMS, TUNING):
        assert [name for name in kind.own() if not kind.type_of(name).tried] == []


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("distributed.strategy", STRATEGIES),
        ("grader, and what it needs", GRADERS.own()),
        (
            "tracker, and what it needs",
            [name for name in TRACKERS.own() if name not in ("jsonl", "tensorboard")],
        ),
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
        ("doctor.md", [{"plugins": "plug-in"}.get(name, name.removesuffix("s")) for name in CHECKS.own()]),
    ],
)
def test_the_page_of_a_kind_names_every_member(page: str, names: list[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    missing = [name for name in names if not re.search(rf"`\[?{name}", text)]
    assert missing == []
