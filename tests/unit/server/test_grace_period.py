"""How long a stage of a secure round waits: the arithmetic of its grace period."""

from __future__ import annotations

import pytest
from gym_server.strategy.pace import FIRST_SHARE, grace_ends
from pydantic import ValidationError

from gym_fed.config.hub.sections import RoundsConfig

CONFIG = RoundsConfig(deadline_seconds=1000, grace_factor=1.5, grace_min_seconds=10, grace_max_seconds=300)


def ends(known: list[float], quorum_at: float = 100.0, config: RoundsConfig = CONFIG) -> float:
    return grace_ends(config, known, 0.0, quorum_at, config.deadline_seconds)


def test_before_enough_is_known_the_grace_is_a_share_of_the_deadline() -> None:
    assert ends([]) == ends([1.0, 1.0]) == 100 + FIRST_SHARE * 1000


def test_the_others_get_a_factor_of_what_nine_in_ten_took_from_the_rounds_start() -> None:
    assert ends([*range(10, 110, 10), 120.0]) == 1.5 * 100
    assert ends([120.0] * 20) == 180


def test_one_slow_contributor_in_nineteen_does_not_stretch_the_grace() -> None:
    assert ends([*[80.0] * 18, 900.0]) == 120


def test_the_bounds_hold_whatever_is_known() -> None:
    assert ends([1.0] * 10) == 110  # grace_min_seconds
    assert ends([900.0] * 10) == 400  # grace_max_seconds
    half = RoundsConfig(deadline_seconds=1000)
    assert ends([5000.0] * 10, config=half) == 600  # half the deadline
    assert ends([5000.0] * 10, quorum_at=900.0, config=half) == 1000  # the deadline itself


@pytest.mark.parametrize(
    "values", [{"grace_min_seconds": 9, "grace_max_seconds": 8}, {"backoff_seconds": 400}]
)
def test_bounds_that_contradict_each_other_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="below"):
        RoundsConfig(**values)  # type: ignore[arg-type]
