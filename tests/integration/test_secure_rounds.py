"""Secure aggregation by real processes: the round survives any kill, and the hub's folder holds no update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gym_fed.privacy.secure_aggregation.votes import MAGIC
from tests.support.federation import Federation
from tests.support.private_configs import NOTHING_COMPARED
from tests.support.wait import SECONDS

pytestmark = pytest.mark.slow
"""The same rounds run in one process in tests/crash, every time."""

SECURE: dict[str, Any] = {
    "rounds": {"num_rounds": 1, "min_contributors": 3, "deadline_seconds": 240, "lease_seconds": 6},
    "secure_aggregation": {"threshold": 3, "begin_with": 4, "stage_seconds": 120, "step_norm": 1.0},
    **NOTHING_COMPARED,
}
NAMES = ["ann", "bob", "cyd"]


@pytest.fixture
def federation(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    found = Federation(tmp_path, tiny_base, **SECURE)
    yield found
    found.close()


@pytest.fixture
def patient(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    """Waits for all four, and for as long as a process takes to start, so that who was killed is in time again."""
    rounds = {**SECURE["rounds"], "min_contributors": 4, "lease_seconds": 60}
    found = Federation(tmp_path, tiny_base, **{**SECURE, "rounds": rounds})
    yield found
    found.close()


def assert_summed(federation: Federation, merged: set[str]) -> None:
    hub = federation.hub
    last = hub.ask("rounds")[-1]
    assert {u["name"] for u in last["updates"] if u["verdict"] == "merged"} == merged
    assert hub.ask("ledger", "verify")["valid"]
    replay = hub.ask("ledger", "replay", str(last["server_round"]))
    assert replay["soup"] == replay["replayed"]
    objects = [path for path in (hub.folder / "objects").rglob("*") if path.is_file()]
    assert {path.read_bytes()[: len(MAGIC)] for path in objects if path.name != replay["soup"]} == {MAGIC}


def test_who_is_killed_after_sharing_its_keys_is_left_out_of_the_sum(federation: Federation) -> None:
    federation.hub.start("--exit-when-done")
    for name in NAMES:
        federation.join(name)
    federation.join("dan", failpoints="client-trained")
    federation.finish()
    assert_summed(federation, set(NAMES))
    for name in NAMES:
        assert "1 update sent" in federation.log(name)
        assert not list((federation.folder / name / "secure").glob("s*"))  # secrets go with the round


@pytest.mark.parametrize("line", ["secure-share", "secure-train", "secure-confirm", "secure-unmasked"])
def test_a_hub_that_is_killed_between_stages_goes_on(patient: Federation, line: str) -> None:
    patient.hub.start("--exit-when-done", failpoints=line)
    patient.join("dan")
    for name in NAMES:
        patient.join(name)
    patient.hub.wait_killed()
    patient.hub.start("--exit-when-done")
    patient.finish()
    assert_summed(patient, {*NAMES, "dan"})


def test_a_contributor_that_is_killed_at_every_stage_and_comes_back_is_in_the_sum(
    patient: Federation,
) -> None:
    patient.hub.start("--exit-when-done")
    for name in NAMES:
        patient.join(name)
    for line in ("advertised", "shared", "masked", "confirmed"):  # for the last answer a hub waits for no one
        assert patient.join("dan", failpoints=f"client-secure-{line}").wait(timeout=2 * SECONDS) == -9
    patient.join("dan")
    patient.finish()
    assert_summed(patient, {*NAMES, "dan"})
