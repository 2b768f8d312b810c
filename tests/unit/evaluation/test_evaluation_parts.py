"""A text longer than the context: its parts are scored one by one and count as one request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.evaluation.evaluator import computed
from gym_fed.evaluation.harness.sources import PreparedRequest
from gym_fed.evaluation.scoring.scorer import Continuation, Loglikelihood

PART = Continuation((1,), (2,))


@pytest.mark.parametrize("greedy", [(True, True), (True, False), (False, True)])
def test_parts_of_a_text_are_summed_and_greedy_only_together(greedy: tuple[bool, bool]) -> None:
    found = [
        Loglikelihood(-1.5, greedy[0], 2),
        Loglikelihood(-0.25, greedy[1], 3),
        Loglikelihood(-9.0, True, 0),
    ]
    scorer: Any = SimpleNamespace(
        loglikelihoods=lambda parts, done: ((place, {"base": found[place]}) for place in (0, 2, 1)),
        answers=lambda asked: iter(()),
    )
    first = PreparedRequest(("texts", 0, 0, 0), (PART, PART))
    second = PreparedRequest(("texts", 1, 0, 0), (PART,))
    outcomes = {request.key: by_model["base"] for request, by_model in computed(scorer, [first, second])}
    assert outcomes == {
        first.key: Loglikelihood(-1.75, all(greedy), 5),
        second.key: Loglikelihood(-9.0, True, 0),
    }
