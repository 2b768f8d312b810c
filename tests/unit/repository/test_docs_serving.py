"""The guide to serving names every command of the terminal; every key of serving.yaml is described on its class."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gym_fed.cli.chat.terminal import _COMMANDS
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.serving import (
    ConnectionsConfig,
    EngineConfig,
    FilterConfig,
    SamplingConfig,
    ServingConfig,
    StoredAnswersConfig,
    TlsConfig,
    VllmConfig,
)

PAGE_OF_FILTER = Path(__file__).resolve().parents[3] / "docs" / "content-filter.md"
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text()


@pytest.mark.parametrize(
    "config",
    [
        ServingConfig,
        EngineConfig,
        VllmConfig,
        ConnectionsConfig,
        StoredAnswersConfig,
        TlsConfig,
        SamplingConfig,
    ],
)
def test_every_key_is_described(config: type[StrictModel]) -> None:
    """A key of a nested section is described by the section's own docstring."""
    described = config.model_json_schema()["properties"]
    missing = [
        name
        for name, field in config.model_fields.items()
        if not described[name].get("description")
        and not (isinstance(field.annotation, type) and issubclass(field.annotation, StrictModel))
    ]
    assert missing == []


def test_every_command_is_named() -> None:
    assert all(name in PAGE for name in _COMMANDS)


def test_the_page_of_the_content_filter_has_its_keys_and_defaults() -> None:
    page = PAGE_OF_FILTER.read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", page, re.MULTILINE))
    config = FilterConfig()
    shown = {False: "false", True: "true"}
    assert rows == {
        name: shown.get(value, value) if isinstance(value, bool | str) else "none" for name, value in config
    }
