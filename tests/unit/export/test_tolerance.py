"""What a tolerance lets pass, figure by figure."""

from __future__ import annotations

import pytest

from gym_fed.export.formats.base import Tolerance

EQUAL = {
    "same_token_ids": True,
    "same_greedy_tokens": True,
    "max": 0.0,
    "largest": 20.0,
    "kl": 0.0,
    "top1": 1.0,
}


@pytest.mark.parametrize(
    ("limits", "figures", "says"),
    [
        (Tolerance(max=1e-5), {"max": 2.1e-4}, "logits that are up to 0.00021 off"),
        (Tolerance(max=1e-5), {"max": float("nan")}, "logits that are up to nan off"),
        (Tolerance(max=None, kl=1e-2), {"kl": 1.1e-2}, "probabilities that are 0.011 nats off"),
        (Tolerance(max=None, kl=1e-2), {"kl": float("nan")}, "probabilities that are nan nats off"),
        (Tolerance(max=None, top1=0.9), {"top1": 0.89}, "the same likeliest token at 89.0% of positions"),
        (Tolerance(max=None), {"same_greedy_tokens": False}, "another answer"),
        (Tolerance(max=None, greedy=False), {"same_token_ids": False}, "other token ids"),
    ],
)
def test_each_figure_beyond_its_limit_is_named(
    limits: Tolerance, figures: dict[str, object], says: str
) -> None:
    assert says in str(limits.problem({**EQUAL, **figures}))


@pytest.mark.parametrize(
    ("limits", "figures"),
    [
        (Tolerance(max=1e-5), {"max": 1.9e-4}),
        (Tolerance(max=None, kl=1e-2), {"kl": 9e-3, "max": 5.0}),
        (Tolerance(max=None, top1=0.9), {"top1": 0.91, "kl": 9.0}),
        (Tolerance(max=None, greedy=False), {"same_greedy_tokens": False}),
    ],
)
def test_what_lies_within_its_limit_passes(limits: Tolerance, figures: dict[str, object]) -> None:
    assert limits.problem({**EQUAL, **figures}) is None
