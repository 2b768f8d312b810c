"""YAML of strangers' folders: merge keys that double a mapping at every line are refused, not expanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.base.files import licence_of
from gym_fed.config.yaml.strict import read_run_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.plain_yaml import parse_value
from gym_fed.webui.models import _bases

DOUBLING = "a0: &a0 {k: v}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60))
"""About 2 kB, and 2^60 entries."""
SLOW_NUMBER = "seed: " + "1:" * 30_000 + "1\n"
"""A number to base 60, whose value takes YAML minutes."""


@pytest.mark.parametrize("text", [DOUBLING, SLOW_NUMBER, "a: " + "[" * 1000 + "]" * 1000 + "\n"])
def test_a_hostile_text_is_refused_by_every_reader(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"alias|number|nested"):
        parse_value(text)
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{text}---\n")
    assert licence_of(tmp_path) == ""
    (tmp_path / "config.yaml").write_text(f"model: gym-nano\n{text}")
    assert _bases(tmp_path) == []
    with pytest.raises(GymError, match=r"config\.yaml") as refused:
        read_run_config(tmp_path)
    assert refused.value.code is ErrorCode.STATE_CORRUPT


def test_an_ordinary_card_and_config_are_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: MIT\n---\n" + "x" * (1 << 17))
    assert licence_of(tmp_path) == "mit"
    (tmp_path / "config.yaml").write_text("model: gym-nano\n")
    assert _bases(tmp_path) == ["gym-nano"]
    assert read_run_config(tmp_path) == {"model": "gym-nano"}
