"""A package whose config format or words cannot be imported does not keep other configs from being read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_fed.config.parsed import dialects
from gym_fed.config.training_file import load_training_config
from gym_fed.core import aliases
from gym_fed.core.errors import GymError


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package whose module fails on import, with entry points that come first in their groups."""
    (tmp_path / "a_broken.py").write_text("raise RuntimeError('no such\\nlibrary')\n")
    facts = tmp_path / "gym_broken-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: gym-broken\nVersion: 1.2\n")
    (facts / "entry_points.txt").write_text(
        "[gym_fed.dialects]\na_broken = a_broken:DIALECT\n[gym_fed.aliases]\na_broken = a_broken\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    dialects.cache_clear()
    aliases._table.cache_clear()
    yield
    dialects.cache_clear()
    aliases._table.cache_clear()


@pytest.mark.usefixtures("broken_package")
def test_configs_are_read_past_a_dialect_that_cannot_be_imported_with_a_warning_that_names_its_package(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("model: gym-nano\ndata: [rows.jsonl]\n")
    assert load_training_config(file)[0].model == "gym-nano"
    assert [dialect.title for dialect in dialects()] == ["LLaMA-Factory"]
    assert "gym_fed.dialects 'a_broken' of gym-broken 1.2 cannot be imported: RuntimeError" in caplog.text
    assert "repair or remove that package" in caplog.text


@pytest.mark.usefixtures("broken_package")
def test_a_wrong_key_is_refused_by_name_past_words_that_cannot_be_imported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("model: gym-nano\nlearning_rat: 1.0e-4\n")
    with pytest.raises(GymError, match="learning_rat"):
        load_training_config(file)
    assert "gym_fed.aliases 'a_broken' of gym-broken 1.2 cannot be imported: RuntimeError" in caplog.text
