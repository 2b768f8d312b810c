"""Repeat single steps of a recorded training from the states before them, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gym_fed.training.audits.observer import StepObserver
from gym_fed.training.audits.states import (
    MOMENTS,
    norm,
    put_state,
    relative_distance,
    take_state,
    trained_parameters,
)

ReadState = Callable[[int, Mapping[str, tuple[int, ...]]], dict[str, Tensor]]
"""Returns the recorded state after a step (0: before training), given the shapes of the trained parameters."""


@dataclass
class ReplayReport:
    """The result of repeated steps.

    Attributes:
        distances: Difference of each step, by number: the largest of those of the weights, as a fraction of the step,
            and of each moment, as a fraction of its norm.
        problem: Why the training is not the recorded one; empty if all steps agree.
    """

    distances: dict[int, float] = field(default_factory=dict)
    problem: str = ""

    def fail(self, problem: str) -> None:
        """Record the first problem."""
        self.problem = self.problem or problem


class StepReplay(StepObserver):
    """Runs the drawn steps of a training; the batches of other steps are drawn, but not computed.

    Args:
        steps: Numbers of the steps to repeat.
        batches: Recorded digests of the batches of these steps.
        read_state: Returns recorded states.
        tolerance: Maximum distance of a repeated step.
    """

    def __init__(
        self, steps: Iterable[int], batches: Mapping[int, str], read_state: ReadState, tolerance: float
    ) -> None:
        super().__init__()
        self._steps = frozenset(steps)
        self._batch_digests, self._read_state, self._tolerance = batches, read_state, tolerance
        self.report = ReplayReport()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def computes(self, step: int) -> bool:
        return step in self._steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the state before training with the recorded one."""
        model = kwargs["model"]
        self.shapes = {name: tuple(p.shape) for name, p in trained_parameters(model).items()}
        own = take_state(model, None)
        if relative_distance(self._read_state(0, self.shapes), own, norm(own)) > self._tolerance:
            self.report.fail("training did not begin from the recipe's adapter")
        self.fix_randomness(args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the recorded state before a drawn step."""
        self._batches = []
        if self.computes(state.global_step + 1):
            self._before = self._read_state(state.global_step, self.shapes)
            put_state(kwargs["model"], _inner(kwargs["optimizer"]), self._before, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare a drawn step with the recorded one."""
        step = int(state.global_step)
        if self.computes(step):
            if self.take_batch_digest() != self._batch_digests[step]:
                self.report.fail(f"the batch of step {step} is not made of these rows")
            self._compare(step, take_state(kwargs["model"], _inner(kwargs["optimizer"])))
        if step >= max(self._steps):
            control.should_training_stop = True
        self.fix_randomness(args, state)

    def _compare(self, step: int, own: Mapping[str, Tensor]) -> None:
        recorded = self._read_state(step, self.shapes)
        weights = {name: recorded[name] for name in self.shapes}
        moved = norm(
            {name: tensor.double() - self._before[name].double() for name, tensor in weights.items()}
        )
        distance = relative_distance(own, weights, moved)
        for moment in MOMENTS:
            # Without this, made-up moments in the state before a step would move the weights anywhere.
            values = {name: tensor for name, tensor in recorded.items() if name.endswith(f".{moment}")}
            distance = max(distance, relative_distance(own, values, norm(values)))
        self.report.distances[step] = distance
        if not distance <= self._tolerance:
            self.report.fail(
                f"step {step} differs by {distance:.2g} of the step; {self._tolerance:g} is tolerated"
            )


def _inner(optimizer: Any) -> Any:
    """Return torch's optimiser inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
