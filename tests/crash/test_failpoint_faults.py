"""A phase of a round that is delayed or fails, or in which the disk is full: the hub resumes, or exits with a reason.

As after a kill, every contributor must be merged exactly once per round, the pool paid once, and the ledger valid.
"""

from __future__ import annotations

import errno
import itertools

import pytest

from gym_fed.core import failpoints
from tests.support.federation import Federation, assert_every_contributor_counts_once_a_round
from tests.support.quick import quick
from tests.support.wait import SECONDS

PHASES = [
    "state-collecting",
    "upload-chunk",
    "after-submit",
    "state-merging",
    "before-commit",
    "after-commit",
]
FAULTS = ["delay3", "raise", "eio", "enospc"]
CLIENT_PHASES = [
    "client-trained",
    "client-encoded",
    "client-before-upload",
    "client-before-submit",
    "client-after-submit",
]
NAMES = ("ann", "bob")


@pytest.mark.parametrize(
    ("phase", "fault"),
    quick(itertools.product(PHASES, FAULTS), ("before-commit", "enospc"), ("upload-chunk", "eio")),
)
def test_a_hub_whose_phase_fails_goes_on_or_leaves_with_a_reason(
    federation: Federation, phase: str, fault: str
) -> None:
    hub = federation.hub
    hub.start("--exit-when-done", failpoints=f"{phase}={fault}")
    for name in NAMES:
        federation.join(name)
    assert hub.process is not None
    process = hub.process
    hub.wait_for("the end", lambda: process.poll() is not None, 4 * SECONDS)
    assert f"failpoint {phase}={fault}" in hub.log()
    if process.poll() != 0:
        assert "Traceback" not in hub.log() or fault == "raise", hub.log()[-3000:]
        if fault == "enospc":
            assert "No space left on device" in hub.log() or "disk" in hub.log()
        hub.start("--exit-when-done")
    federation.finish()
    assert_every_contributor_counts_once_a_round(hub, set(NAMES))


@pytest.mark.parametrize(
    ("phase", "fault"), quick(itertools.product(CLIENT_PHASES, FAULTS), ("client-before-upload", "enospc"))
)
def test_a_contributor_whose_phase_fails_goes_on_or_joins_again(
    federation: Federation, phase: str, fault: str
) -> None:
    # A contributor whose training fails is missing until the deadline.
    federation.hub.configure({"rounds": {"deadline_seconds": 60}})
    federation.hub.start("--exit-when-done")
    federation.join("bob")
    ann = federation.join("ann", failpoints=f"{phase}={fault}")
    waits_for_room = "work waits for"
    federation.hub.wait_for(
        "the end",
        lambda: (
            ann.poll() is not None
            or federation.hub.process.poll() is not None
            or waits_for_room in federation.log("ann")
        ),
        4 * SECONDS,
    )
    assert f"failpoint {phase}={fault}" in federation.log("ann")
    if waits_for_room in federation.log("ann"):
        federation.hub.ask("skip", "--reason", "no room")  # the round ends as at its deadline
    if ann.poll() not in (None, 0):
        assert "Traceback" not in federation.log("ann") or fault == "raise", federation.log("ann")[-3000:]
        federation.join("ann")
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, set(NAMES))


def test_each_fault_acts_once_at_the_call_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def arm(text: str) -> None:
        monkeypatch.setattr(failpoints, "_armed", dict([failpoints._parse(text)]))

    arm("here:2=enospc")
    failpoints.failpoint("here")
    failpoints.failpoint("elsewhere")
    with pytest.raises(OSError, match="No space left") as full:
        failpoints.failpoint("here")
    assert full.value.errno == errno.ENOSPC
    failpoints.failpoint("here")
    arm("here=raise")
    with pytest.raises(RuntimeError, match="failpoint here"):
        failpoints.failpoint("here")
    arm("here=nonsense")
    with pytest.raises(ValueError, match="unknown action nonsense"):
        failpoints.failpoint("here")
