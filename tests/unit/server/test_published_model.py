"""`gym-server model` writes weights in the dtype of the base's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gym_server.cli.main import app
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.hub_model import write_version
from gym_server.store.tables import published
from safetensors.torch import load_file
from sqlalchemy import select
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import tensors_digest


@pytest.mark.parametrize("base_dtype", ["bfloat16", "float32"])
def test_a_version_has_the_dtype_and_the_size_of_its_base(
    tiny_base: Path, tmp_path: Path, base_dtype: str
) -> None:
    loaded = load_model(str(tiny_base))
    base = tmp_path / "base"
    loaded.model.to(getattr(torch, base_dtype)).save_pretrained(base)
    loaded.tokenizer.save_pretrained(base)
    init_hub(tmp_path / "hub", HubChoices(str(base), "h", "open"))
    with Federation.open(tmp_path / "hub") as fed:
        found = write_version(fed.state, fed.config, tmp_path / "out")
        exact = write_version(fed.state, fed.config, tmp_path / "exact", dtype="float32")
        with pytest.raises(GymError) as caught:
            write_version(fed.state, fed.config, tmp_path / "none", dtype="int4")
        with fed.database.reading() as tx:
            known = set(tx.scalars(select(published.c.digest)))
    assert caught.value.code is ErrorCode.USAGE
    assert found["dtype"] == base_dtype
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        getattr(torch, base_dtype)
    }
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (base, tmp_path / "out")]
    assert abs(sizes[0] - sizes[1]) < 1000
    assert tensors_digest(load_model(str(tmp_path / "out")).model) == found["base_digest"]
    assert known == {found["base_digest"], exact["base_digest"]}, "variants made on the folder are known here"


def test_a_model_that_is_written_before_any_version_is_called_the_base(
    tiny_base: Path, tmp_path: Path
) -> None:
    init_hub(tmp_path / "hub", HubChoices(str(tiny_base), "h", "open"))
    done = CliRunner().invoke(app, ["model", str(tmp_path / "out"), "--dir", str(tmp_path / "hub")])

    assert done.exit_code == 0, done.output
    assert "(the base itself, without any contribution)" in done.stdout
