"""A burst of requests to an idle engine is prefilled in one step."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.config.serving import EngineConfig
from gym_fed.serving.engine import input_queue
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.engine.input_queue import InputQueue
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from tests.support.toy_engine import ToyModel
from tests.support.wait import SECONDS


class Arrivals:
    """In place of the queue's condition: each time that is waited on, the next requests arrive."""

    def __init__(self, queue: Any, counts: list[int]) -> None:
        self._queue, self._counts, self.waits = queue, counts, 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout: float) -> None:
        assert timeout > 0
        self.waits += 1
        new = self._counts.pop(0) if self._counts else 0
        self._queue._arrived += [SimpleNamespace(user="a")] * new


@pytest.mark.parametrize(("first", "then", "waits"), [(0, [], 0), (1, [], 1), (1, [2, 1], 3), (3, [0, 5], 1)])
def test_it_waits_as_long_as_more_come(first: int, then: list[int], waits: int) -> None:
    queue: Any = InputQueue(EngineConfig(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    queue._arrived = [SimpleNamespace(user="a")] * first
    queue._changed = arrivals = Arrivals(queue, then)
    queue.gather()
    assert arrivals.waits == waits


def test_a_burst_without_end_is_taken_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: Any = InputQueue(EngineConfig(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    queue._arrived = [SimpleNamespace(user="a")]
    queue._changed = arrivals = Arrivals(queue, [1] * 1000)
    now = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: 0.001 * next(now))
    queue.gather()
    assert arrivals.waits == 7


def test_the_prompts_of_a_burst_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_queue, "_PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(input_queue, "_BURST_SECONDS", 20.0)
    toy: Any = ToyModel()
    with Engine(toy, load_tokenizer("gym-nano")) as engine:
        time.sleep(0.05)  # it waits for requests
        sampling = SamplingParams(max_tokens=3, seed=1)
        running = [engine.submit(GenerationRequest([7] * 5, sampling, user=f"u{n}")) for n in range(6)]
        for one in running:
            one.result(SECONDS)
        assert engine.stats().steps == 3
