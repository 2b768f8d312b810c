"""Screening by norm: who is far above the round's median."""

from __future__ import annotations

import math

import pytest

from gym_fed.soup.screening import screen_norms


def test_norms_far_above_the_median_are_refused_with_a_reason() -> None:
    verdicts = screen_norms([1.0, 1.2, 0.9, 8.0], 3.0)
    assert [verdict.accepted for verdict in verdicts] == [True, True, True, False]
    assert verdicts[3].ratio == pytest.approx(8.0 / 1.1)
    assert verdicts[3].reason == "its norm 8 is 7.27 times the median 1.1, over 3 times"
    assert verdicts[0].reason == ""


def test_a_minority_cannot_move_the_median_past_honest_norms() -> None:
    verdicts = screen_norms([1.0, 1.1, 0.9, 1e9, 1e9], 2.0)
    assert [verdict.accepted for verdict in verdicts] == [True, True, True, False, False]


def test_when_most_are_zero_only_zero_stays() -> None:
    verdicts = screen_norms([0.0, 0.0, 1.0], 3.0)
    assert [verdict.accepted for verdict in verdicts] == [True, True, False]
    assert verdicts[2].ratio == math.inf


def test_no_norms_no_verdicts() -> None:
    assert screen_norms([], 3.0) == []


@pytest.mark.parametrize(
    ("norms", "ratio"), [([1.0], 0.5), ([float("nan")], 3.0), ([-1.0], 3.0), ([1.0], math.nan)]
)
def test_what_makes_no_sense_is_refused(norms: list[float], ratio: float) -> None:
    with pytest.raises(ValueError, match=r"below 1|not all finite"):
        screen_norms(norms, ratio)
