"""A hub with continuous rounds and three contributors as real processes, one of them slowed by its own policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.federation import CONFIG, Federation
from tests.support.wait import SECONDS

pytestmark = pytest.mark.slow  # a hub and three contributors, for several rounds


def test_rounds_go_on_while_one_contributor_uploads_slowly_and_its_update_is_merged_later(
    tmp_path: Path, tiny_base: Path
) -> None:
    rounds = {"num_rounds": 99, "mode": "continuous", "merge_every": 2, "min_contributors": 2}
    federation = Federation(tmp_path, tiny_base, rounds={**CONFIG["rounds"], **rounds})
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "policy.yaml").write_text("max_upload_bytes_per_second: 1024\n")
    try:
        hub = federation.hub.start()
        for name in ("slow", "ann", "bob"):
            federation.join(name)

        def merged_later() -> tuple[int, list[dict[str, Any]]] | None:
            for found in hub.ask("rounds"):
                names = {u["name"] for u in found["updates"] if u["verdict"] == "merged"}
                if "slow" in names and found["server_round"] > 1:
                    return found["server_round"], hub.ask("rounds")
            return None

        number, history = hub.wait_for("the slow update", merged_later, 4 * SECONDS)
        before = [found for found in history if found["server_round"] < number]
        assert [found["state"] for found in before] == ["committed"] * (number - 1)
        assert all(len(found["updates"]) == 2 for found in before)
        assert "lost" not in federation.log("slow")
        assert hub.stop() == 0
        found = hub.ask("ledger", "replay", str(number))
        assert found["soup"] == found["replayed"]
        assert hub.ask("ledger", "verify")["valid"]
    finally:
        federation.close()
