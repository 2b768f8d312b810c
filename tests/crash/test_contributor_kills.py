"""Nothing acknowledged is lost and nothing is counted twice, wherever a contributor is killed, late or gone.

Real processes, SIGKILL, and the same folder again. After every kill the federation must end with its two rounds
committed, every contributor merged exactly once a round, the pool paid once a round, and a ledger that verifies.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.federation import CONFIG, ROUNDS, Federation, assert_every_contributor_counts_once_a_round
from tests.support.quick import quick
from tests.support.wait import SECONDS

CLIENT_KILLS = ["client-trained", "client-before-upload", "client-before-submit", "client-after-submit"]


@pytest.mark.parametrize("line", quick(CLIENT_KILLS, "client-before-submit"))
def test_a_contributor_killed_at_any_line_goes_on_from_there(federation: Federation, line: str) -> None:
    federation.hub.start("--exit-when-done")
    federation.join("bob")
    assert federation.join("ann", failpoints=line).wait(timeout=2 * SECONDS) == -9
    federation.join("ann")
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})
    if line != "client-trained":  # the signed update was kept: the first round was trained once, not twice
        assert federation.log("ann").count("training 3/3") == ROUNDS


@pytest.mark.slow  # two runs of a contributor; test_run_kills.py kills one too
def test_a_contributor_killed_while_training_resumes_from_its_checkpoint(
    tmp_path: Path, tiny_base: Path
) -> None:
    federation = Federation(tmp_path, tiny_base, recipe={"max_steps": 400, "per_device_train_batch_size": 4})
    try:
        federation.hub.start("--exit-when-done")
        federation.join("bob")
        ann = federation.join("ann")
        federation.hub.wait_for("ann at step 120", lambda: "training 120/400" in federation.log("ann"))
        ann.kill()
        ann.wait()
        federation.join("ann")
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})
        assert federation.log("ann").count("training 1/400") == ROUNDS  # never began anew
    finally:
        federation.close()


@pytest.mark.slow  # waits for a deadline
def test_who_leaves_for_good_is_not_waited_for(federation: Federation) -> None:
    federation.hub.start("--exit-when-done")
    gone = federation.join("eve", failpoints="client-trained")
    assert gone.wait(timeout=2 * SECONDS) == -9
    for name in ("ann", "bob"):
        federation.join(name)
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})


@pytest.mark.slow  # a hub and three contributors
def test_who_joins_late_is_in_the_same_round(federation: Federation) -> None:
    federation.hub.start("--exit-when-done")
    federation.join("ann")
    federation.hub.wait_for("ann's first receipt", lambda: "receipt: admitted" in federation.log("ann"))
    federation.join("bob")
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})


@pytest.mark.slow  # waits for a deadline
def test_a_round_without_a_quorum_aborts_with_a_reason_and_the_next_one_succeeds(
    tmp_path: Path, tiny_base: Path
) -> None:
    rounds = {**CONFIG["rounds"], "num_rounds": 1, "deadline_seconds": 12}
    federation = Federation(tmp_path, tiny_base, rounds=rounds)
    try:
        federation.hub.start("--exit-when-done")
        federation.join("ann")
        aborted = federation.hub.wait_for(
            "an abort", lambda: [r for r in federation.hub.ask("rounds") if r["state"] == "aborted"], 90
        )[0]
        assert aborted["reason"] == "1 of 2 updates at the deadline"
        assert [u["verdict"] for u in aborted["updates"]] == ["aborted"]
        federation.join("bob")
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"}, rounds=1)
    finally:
        federation.close()
