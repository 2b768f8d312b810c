"""Real processes over gRPC with TLS: the number of examples in the signed manifest is the number that is learned."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.federation import Federation


def rows(short: int, long: int) -> list[dict[str, Any]]:
    def row(question: str) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "yes, of course"},
            ]
        }

    return [row(f"ask {i}") for i in range(short)] + [row(f"{i} " + "many words " * 9) for i in range(long)]


@pytest.mark.slow  # a hub, and a contributor who trains
def test_a_join_signs_the_rows_that_it_learned_and_not_those_that_it_was_given(
    tiny_base: Path, tmp_path: Path
) -> None:
    few = {"num_rounds": 1, "min_contributors": 1, "deadline_seconds": 240, "lease_seconds": 60}
    federation = Federation(tmp_path, tiny_base, rounds=few)
    try:
        federation.hub.start("--exit-when-done")
        federation.join("ana", rows=rows(short=5, long=7))
        federation.finish()
    finally:
        federation.close()
    with sqlite3.connect(federation.hub.folder / "hub.db") as database:
        manifests = [json.loads(text) for (text,) in database.execute("SELECT manifest FROM updates")]
    assert [manifest["num_examples"] for manifest in manifests] == [5]
    assert "5 of 12 rows are trained on, 7 dropped" in " ".join(federation.log("ana").split())
