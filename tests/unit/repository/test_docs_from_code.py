"""Pages that are built from the code or compared with it: keys of configs, public names, error codes, the citation."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from gym_fed.cli.docs import (
    CONFIG_FILES,
    PUBLIC_PACKAGES,
    api_page,
    config_page,
    config_sections,
)
from gym_fed.core.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def test_the_page_of_the_configs_has_every_file_with_its_sections() -> None:
    shown = config_page()
    assert [title for title in CONFIG_FILES if f"\n## {title}\n" not in shown] == []
    assert "\n### `lora`\n" in shown
    assert "| `num_train_epochs` |" in shown


@pytest.mark.slow  # imports every public name, ten seconds
def test_the_page_of_the_python_names_has_every_public_name() -> None:
    offered = {
        f"{package}.{name}"
        for package in PUBLIC_PACKAGES
        for name in getattr(importlib.import_module(package), "__all__", ())
        if not name.startswith("_")
    }
    shown = api_page()
    places = set(re.findall(r"^::: (\S+)$", shown, re.MULTILINE))
    assert offered == {name for name in places if not name.startswith("gym_fed.quickstart.")}
    rows = set(re.findall(r"^\| `(\w+)` \| \S", shown, re.MULTILINE))
    assert {name.rpartition(".")[2] for name in places} == rows


def test_a_key_is_shown_with_its_type_limits_and_default() -> None:
    schema = {"properties": {"port": {"type": "integer", "default": 1, "minimum": 0, "description": "A. B."}}}
    assert "| `port` | integer ≥ 0 | `1` | A |" in list(config_sections(schema))


def test_every_error_code_has_its_remedy() -> None:
    row = r"^\| `([a-z-]+)` \| \d+ \| `\w+` \| \d+ \| ([^|]+) \| ([^|]+) \|$"
    rows = re.findall(row, (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert {code: words for code, words, _ in rows} == {code.value: code.help for code in ErrorCode}
    assert [code for code, _, remedy in rows if len(remedy.split()) < 4] == []


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


def test_the_card_of_gym_nano_has_the_figures_of_the_one_beside_its_weights() -> None:
    card = (ROOT / "gym_fed/assets/gym-nano/README.md").read_text()
    figures = re.findall(r"\b(\w+) \| (\d+\.\d%)", card.partition("never shown")[0])
    assert len(figures) == 13
    page = (DOCS / "model-card-gym-nano.md").read_text()
    assert [f"{task} | {share}" for task, share in figures if f"{task} | {share}" not in page] == []
