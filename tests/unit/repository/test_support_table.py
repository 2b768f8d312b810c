"""The page of what runs where is made from the registry, and names everything else that can be named in a config."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from gym_fed.config.train.distributed import DistributedSettings
from gym_fed.core.registries import ALGORITHMS, CHECKS, FORMATS, GRADERS, TRACKERS, TUNING
from gym_fed.training.algorithms.sft import Sft

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "support.md").read_text(encoding="utf-8")
STRATEGIES = list(get_args(DistributedSettings.model_fields["strategy"].annotation))


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("support_tables", ROOT / "tools" / "support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_what_the_registry_says() -> None:
    assert tool().page() == PAGE, "run: python tools/support.py"


def test_a_fact_that_changes_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sft, "tried", "nothing")
    assert "| nothing |" in tool().page()


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
