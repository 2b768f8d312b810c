"""Replay single steps of a recorded training run from the states before them, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gym_fed.training.audits.observer import StepObserver
from gym_fed.training.audits.states import (
    MOMENTS,
    WEIGHTS,
    put_state,
    relative_distance,
    take_state,
    trained_parameters,
)

ReadState = Callable[[int, int], dict[str, Tensor]]
"""Returns the recorded state after a step (0: before training), given the step and the number of trained weights."""


@dataclass
class ReplayReport:
    """The result of replayed steps.

    Attributes:
        distances: The difference of each step from the record, by step number: the maximum over the weights, as a
            fraction of the step, and over each moment, as a fraction of its norm.
        problem: The reason why the training run is not the recorded one; empty if all steps agree.
    """

    distances: dict[int, float] = field(default_factory=dict)
    problem: str = ""

    def fail(self, problem: str) -> None:
        """Record a problem, unless one was already recorded."""
        self.problem = self.problem or problem


class StepReplay(StepObserver):
    """Replays the given steps of a training run. For all other steps, batches are drawn but not computed.

    Args:
        steps: Numbers of the steps to replay.
        batches: Recorded digests of the batches of these steps.
        read_state: Returns recorded states.
        tolerance: Maximum distance of a replayed step.
    """

    def __init__(
        self, steps: Iterable[int], batches: Mapping[int, str], read_state: ReadState, tolerance: float
    ) -> None:
        super().__init__()
        self._steps = frozenset(steps)
        self._batch_digests, self._read_state, self._tolerance = batches, read_state, tolerance
        self.report = ReplayReport()
        self.num_weights = 0

    def computes(self, step: int) -> bool:
        return step in self._steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the state before training with the recorded one."""
        self._parameters = trained_parameters(kwargs["model"])
        own = take_state(self._parameters)[WEIGHTS]
        self.num_weights = own.numel()
        recorded = self._read_state(0, self.num_weights)[WEIGHTS]
        if not relative_distance(recorded, own, float(own.double().norm())) <= self._tolerance:
            self.report.fail("training did not start from the recipe's adapter")
        self.fix_randomness(args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the recorded state before a replayed step."""
        self._batches = []
        if self.computes(state.global_step + 1):
            self._before = self._read_state(state.global_step, self.num_weights)
            put_state(self._parameters, _inner(kwargs["optimizer"]), self._before, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare a replayed step with the recorded one."""
        step = int(state.global_step)
        if self.computes(step):
            if self.take_batch_digest() != self._batch_digests[step]:
                self.report.fail(f"the batch of step {step} differs from the recorded one")
            self._compare(step, take_state(self._parameters, _inner(kwargs["optimizer"])))
        if step >= max(self._steps):
            control.should_training_stop = True
        self.fix_randomness(args, state)

    def _compare(self, step: int, own: Mapping[str, Tensor]) -> None:
        recorded = self._read_state(step, self.num_weights)
        moved = float((recorded[WEIGHTS].double() - self._before[WEIGHTS].double()).norm())
        distance = relative_distance(own[WEIGHTS], recorded[WEIGHTS], moved)
        for moment in MOMENTS:
            # Without this check, forged moments in the state before a step could move the weights anywhere.
            values = recorded[moment]
            distance = max(distance, relative_distance(own[moment], values, float(values.double().norm())))
        self.report.distances[step] = distance
        if not distance <= self._tolerance:
            limit = f"above the tolerance {self._tolerance:g}"
            self.report.fail(f"step {step}: the relative difference is {distance:.2g}, {limit}")


def _inner(optimizer: Any) -> Any:
    """Return torch's optimiser inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
