"""A hub that is killed while it evaluates a soup goes on: one seed and one evaluation a round, rows by that seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.federation import ROUNDS, Federation, assert_every_contributor_counts_once_a_round
from tests.support.quick import quick

KILLS = ["evaluated-before", "evaluated-after", "evaluation-recorded", "after-commit"]
GATE = {"evals": [{"suite": "tiny_cloze", "limit": 8, "max_drop": 1.0}]}


@pytest.mark.parametrize("line", quick(KILLS))
def test_a_hub_killed_while_it_evaluates_goes_on_from_there(
    tmp_path: Path, tiny_base: Path, line: str
) -> None:
    federation = Federation(tmp_path, tiny_base, gate=GATE)
    try:
        names = ("ann", "bob")
        federation.hub.start("--exit-when-done", failpoints=line)
        for name in names:
            federation.join(name)
        federation.hub.wait_killed()
        promised = federation.hub.ask("ledger", "show", "--kind", "evaluation-seed")
        federation.hub.start("--exit-when-done")
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, set(names))
        seeds = federation.hub.ask("ledger", "show", "--kind", "evaluation-seed")
        assert seeds[: len(promised)] == promised, "what was promised stands"
        assert Counter(entry["body"]["server_round"] for entry in seeds) == dict.fromkeys(
            range(1, ROUNDS + 1), 1
        )
        evaluated = federation.hub.ask("ledger", "show", "--kind", "evaluated")
        assert [entry["body"]["height"] for entry in evaluated] == list(range(1, ROUNDS + 1))
    finally:
        federation.close()
