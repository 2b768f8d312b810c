"""The guide to serving names every key of serving.yaml with its default, and every command of the terminal."""

from __future__ import annotations

import re
from pathlib import Path

from gym_fed.cli.chat.terminal import _COMMANDS
from gym_fed.config.serving import (
    ConnectionsConfig,
    EngineConfig,
    FilterConfig,
    SamplingConfig,
    ServingConfig,
    StoredAnswersConfig,
    TlsConfig,
)

PAGE_OF_FILTER = Path(__file__).resolve().parents[3] / "docs" / "content-filter.md"
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text()
KEYS = PAGE.partition("\n## serving.yaml\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", KEYS, re.MULTILINE))


def test_every_key_has_a_row_and_its_default() -> None:
    keys = {key for cell in ROWS for key in re.findall(r"`([a-z_.]+)`", cell)}
    engine = {f"engine.{name}" for name in EngineConfig.model_fields}
    connections = {f"connections.{name}" for name in ConnectionsConfig.model_fields}
    stored = {f"stored_answers.{name}" for name in StoredAnswersConfig.model_fields}
    tls = {f"tls.{name}" for name in TlsConfig.model_fields}
    sampling = {f"sampling.{name}" for name in SamplingConfig.model_fields}
    whole = set(ServingConfig.model_fields) - {"engine", "connections", "stored_answers", "tls", "sampling"}
    assert keys == whole | engine | connections | stored | tls | sampling
    config = ServingConfig()
    for name in EngineConfig.model_fields:
        default = getattr(config.engine, name)
        shown = {4 * 2**30: "4GiB", None: "the model's"}.get(default, str(default).lower())
        assert ROWS[f"`engine.{name}`"] == shown
    for name in ("base", "dtype", "device"):
        assert ROWS[f"`{name}`"] == getattr(config, name)


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
