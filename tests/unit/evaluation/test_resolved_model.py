"""The resolution of a model's names before an evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gym_fed.base.models import nano_path
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.scoring.models import ModelRequest, dense_model, origin_of, resolve_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A model folder that states it is a finished run on gym-nano."""
    folder = Path(shutil.copytree(nano_path(), tmp_path / "run"))
    (folder / "config.yaml").write_text("model: gym-nano\nmax_length: 32\n")
    (folder / "result.json").write_text("{}")
    return folder


def test_a_run_is_resolved_once_and_later_changes_of_its_config_are_not_seen(run: Path) -> None:
    model = resolve_model(ModelRequest(str(run)))
    assert model.folder == run
    assert (model.source, model.delta, model.variants) == (str(run), None, ())
    assert model.run_config is not None
    (run / "config.yaml").unlink()
    assert model.run_config["max_length"] == 32
    base = origin_of(model)
    assert base is not None
    assert (base.source, base.downloads) == ("gym-nano", ["gym-nano"])


def test_a_model_in_memory_is_its_own_source_and_needs_no_download(run: Path) -> None:
    loaded = dense_model(resolve_model(ModelRequest(str(run))))
    model = resolve_model(ModelRequest(loaded))
    assert model.source is loaded
    assert model.downloads == []


def test_a_variant_that_is_not_in_the_store_is_refused_when_the_name_is_resolved(tmp_path: Path) -> None:
    with pytest.raises(GymError) as failed:
        resolve_model(ModelRequest("gym-nano:absent", store=tmp_path / "none"))
    assert failed.value.code is ErrorCode.FILE_NOT_FOUND
