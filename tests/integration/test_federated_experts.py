"""Contributors improve one mixture of experts: their deltas are merged, and the routers' loss is reported."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_model
from gym_fed.delta.file import DeltaFile
from tests.support.adapters import sibling
from tests.support.federation import CONFIG, Federation

TRAINING = {**CONFIG["recipe"], "learning_rate": 1e-3}
CHANGED = {"full": ".experts.", "lora": "q_proj"}
"""Part of the names of tensors that a case changes; a hub's rounds train fused experts only as a whole."""
CASES: dict[str, dict[str, Any]] = {
    "full": {"recipe": TRAINING, "codec": {"codec": "bitdelta"}},
    "lora": {
        "recipe": {
            **TRAINING,
            "finetuning": "lora",
            "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        },
        "codec": {"factors": "bfloat16"},
    },
}


@pytest.mark.slow  # trains two contributors for two rounds; adapters on experts are tested in the unit tests, too
@pytest.mark.parametrize("case", sorted(CASES))
def test_two_rounds_change_the_mixture_and_report_the_loss_of_its_routers(case: str, tmp_path: Path) -> None:
    base = sibling("Qwen3Moe", tmp_path / "base", head_dim=8)
    federation = Federation(tmp_path, base, **{**CONFIG, **CASES[case]})
    try:
        federation.complete("ann", "bob")
        federation.hub.ask("model", str(tmp_path / "tuned"))
    finally:
        federation.close()
    before = dict(load_model(str(base)).model.named_parameters())
    after = dict(load_model(str(tmp_path / "tuned")).model.named_parameters())
    changed = [name for name in before if CHANGED[case] in name]
    assert changed
    for name in changed:
        assert not before[name].equal(after[name]), name
    for path in (tmp_path / "hub" / "objects").rglob("*"):
        if path.is_file():
            with DeltaFile.open(path) as delta:
                assert any(CHANGED[case] in name for name in delta.names)
    with contextlib.closing(sqlite3.connect(federation.hub.folder / "hub.db")) as database:
        manifests = [json.loads(row) for (row,) in database.execute("SELECT manifest FROM updates")]
    assert len(manifests) == 4
    for manifest in manifests:
        assert 1.0 < manifest["metrics"]["aux_loss"] < 4.0  # at least 2 experts per token, at most all 4
