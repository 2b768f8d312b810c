"""Contributors encode with the codec that the coordinator's file names, and the hub merges what they send."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gym_fed.delta.file import DeltaFile
from tests.support.federation import CONFIG, Federation
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


def assert_soups_came_back_as_factors(federation: Federation) -> None:
    """The hub announced it, stored it, and the second round's training began from it on both machines."""
    assert "soups are sent as LoRA factors" in federation.hub.log()
    with contextlib.closing(sqlite3.connect(federation.hub.folder / "hub.db")) as database:
        soups = database.execute("SELECT soup_sha256, soup_bytes FROM versions ORDER BY height").fetchall()
    for sha256, _ in soups:
        (path,) = (federation.hub.folder / "objects").rglob(sha256)
        with DeltaFile.open(path) as soup:
            codecs = {name: soup.record(name).codec for name in soup.names}
            large = {
                codec for name, codec in codecs.items() if ".mlp." in name
            }  # of the others values are smaller
            assert large == {"lora"}
            assert not any("embed" in name for name in codecs)
    for name in ("ann", "bob"):
        lines = (federation.folder / name / "receipts.jsonl").read_text().splitlines()
        sent = [line for line in map(json.loads, lines) if line.get("verdict") == "admitted"]
        assert [line["bytes_down"] for line in sent] == [0, soups[0][1]]  # the first soup, and nothing else
        assert all(line["bytes_up"] > 0 for line in sent)


@pytest.mark.parametrize("case", quick(sorted(CASES), "factors"))
def test_two_rounds_with_another_codec(tmp_path: Path, tiny_base: Path, case: str) -> None:
    federation = Federation(tmp_path, tiny_base, **CASES[case])
    try:
        federation.complete("ann", "bob")
        assert ("distilling 4/4" in federation.log("ann")) == (case == "grids")
        residuals = list(tmp_path.glob("ann/**/residual.safetensors"))
        assert len(residuals) == 1  # what two rounds lost was kept
        seen = set()
        for path in (tmp_path / "hub" / "objects").rglob("*"):
            if path.is_file():
                with DeltaFile.open(path) as delta:
                    seen.add(frozenset(delta.record(name).codec for name in delta.names))
        assert frozenset(WANTED[case]) in seen
        assert "Heartbeat" not in federation.hub.log()  # none came after its task was answered
        if case == "factors":
            assert_soups_came_back_as_factors(federation)
    finally:
        federation.close()
