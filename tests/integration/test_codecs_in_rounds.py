"""Contributors encode with the codec that the coordinator's file names, and the hub merges what they send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.delta import DeltaFile
from tests.support.federation import CONFIG, Federation, assert_every_contributor_counts_once_a_round
from tests.support.quick import quick

CASES: dict[str, dict[str, Any]] = {
    "factors": {
        "recipe": {**CONFIG["recipe"], "finetuning": "lora", "lora": {"r": 4}},
        "codec": {"factors": "int4"},
    },
    "grids": {
        "codec": {"codec": "ternary", "embeddings": "int4", "scale_dtype": "bfloat16", "distill_steps": 4}
    },
}
WANTED = {"factors": {"lora"}, "grids": {"ternary", "int4", "dense"}}


@pytest.mark.parametrize("case", quick(sorted(CASES), "grids"))
def test_two_rounds_with_another_codec(tmp_path: Path, tiny_base: Path, case: str) -> None:
    federation = Federation(tmp_path, tiny_base, **CASES[case])
    try:
        federation.hub.start("--exit-when-done")
        for name in ("ann", "bob"):
            federation.join(name)
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})
        assert ("distilling 4/4" in federation.log("ann")) == (case == "grids")
        residuals = list(tmp_path.glob("ann/**/residual.safetensors"))
        assert len(residuals) == 1  # what two rounds lost was kept
        seen = set()
        for path in (tmp_path / "hub" / "objects").rglob("*"):
            if path.is_file():
                with DeltaFile.open(path) as delta:
                    seen.add(frozenset(delta.record(name).codec for name in delta.names))
        assert frozenset(WANTED[case]) in seen
    finally:
        federation.close()
