"""Compute the privacy cost of a run, planned and after each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gym_fed.config.train.optimization import TrainingPrivacy
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.privacy.accountant import NoiseEvent, epsilon, noise_multiplier_for

_BOUND_CHANGES = 4
_MIN_BOUND_STEPS = 10
_MAX_NOISE_SHARE = 100.0
"""Maximum ratio of a run's noise to its signal. At this ratio, 10,000 runs together would still be half noise."""


@dataclass(frozen=True)
class Plan:
    """The DP-SGD parameters of a run that determine its privacy cost.

    Attributes:
        num_examples: Number of examples from which batches are drawn.
        expected_batch_size: Mean number of examples per step, by which the sum of their gradients is divided.
        steps: Number of steps of the whole run.
        noise_multiplier: Ratio of the noise's standard deviation to ``max_grad_norm``.
        max_grad_norm: Norm to which each example's gradient is clipped.
        target_delta: Delta at which epsilon is reported.
    """

    num_examples: int
    expected_batch_size: int
    steps: int
    noise_multiplier: float
    max_grad_norm: float
    target_delta: float

    @property
    def noise_share(self) -> float:
        """The ratio of the run's noise to the largest possible sum of its examples' gradients in any direction.

        Summed over all steps, the noise has the standard deviation ``noise_multiplier * C * sqrt(steps)``, and examples
        whose clipped gradients are all equal add up to ``C * expected_batch_size * steps``.
        """
        return self.noise_multiplier / (self.expected_batch_size * math.sqrt(self.steps))

    @property
    def sampling_probability(self) -> float:
        """The sampling probability per example."""
        return self.expected_batch_size / self.num_examples

    def event(self, steps: int | None = None) -> NoiseEvent:
        """Return the accountant's event for the given number of steps; by default, for all steps."""
        return NoiseEvent(
            noise_multiplier=self.noise_multiplier,
            sampling_probability=self.sampling_probability,
            count=self.steps if steps is None else steps,
        )

    def epsilon(self, steps: int | None = None) -> float:
        """Return epsilon at ``target_delta`` after the given number of steps; by default, after all steps."""
        return epsilon([self.event(steps)], self.target_delta)

    def epsilon_at_most(self, step: int) -> float:
        """Return a cheap upper bound on ``epsilon(step)``, which changes only a few times per run."""
        interval = max(_MIN_BOUND_STEPS, math.ceil(self.steps / _BOUND_CHANGES))
        return self.epsilon(min(self.steps, interval * math.ceil(step / interval)))


def make_plan(config: TrainingConfig, num_examples: int) -> Plan:
    """Create the privacy plan of a run whose config has ``privacy``.

    Raises:
        GymError: ``CONFIG_INVALID`` if a batch is larger than the data, if no noise achieves ``target_epsilon``, or if
            the noise hides any signal; ``MISSING_DEPENDENCY``.
    """
    privacy = config.privacy
    assert privacy is not None
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if batch > num_examples:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"per_device_train_batch_size x gradient_accumulation_steps is {batch}, but there are only "
            f"{counted(num_examples, 'example')}",
            "lower them: privacy relies on using a small share of the examples per step",
        )
    steps = config.max_steps or math.ceil(config.num_train_epochs * num_examples / batch)
    plan = Plan(
        num_examples=num_examples,
        expected_batch_size=batch,
        steps=steps,
        noise_multiplier=_noise_multiplier(privacy, batch / num_examples, steps),
        max_grad_norm=privacy.max_grad_norm,
        target_delta=privacy.target_delta,
    )
    _require_a_signal(plan)
    plan.epsilon()  # raises the accountant's errors now instead of after training
    return plan


def _require_a_signal(plan: Plan) -> None:
    """Refuse a run whose noise hides any signal; warn if the run alone would learn next to nothing.

    The limit is high because a federation averages over contributors and rounds.
    """
    share = plan.noise_share
    reason = (
        f"privacy: noise_multiplier is {plan.noise_multiplier:.4g}: over {counted(plan.steps, 'step')} of about "
        f"{counted(plan.expected_batch_size, 'example')} the noise is {share:.3g} times the maximum "
        "contribution of the examples"
    )
    remedy = "raise target_epsilon (or lower noise_multiplier), or use larger batches or more steps"
    if share > _MAX_NOISE_SHARE:
        raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
    if share > 1:
        console.err.print(f"{reason}; almost nothing will be learned. {remedy.capitalize()}")


def _noise_multiplier(privacy: TrainingPrivacy, sampling_probability: float, steps: int) -> float:
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.target_epsilon is not None  # the config requires one of the two
    return noise_multiplier_for(
        privacy.target_epsilon, privacy.target_delta, sampling_probability=sampling_probability, count=steps
    )
