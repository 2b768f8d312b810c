"""What a private run does to the privacy of its examples, before its first step and after every one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gym_fed.config.private_training import TrainingPrivacy
from gym_fed.config.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.privacy.accountant import NoiseEvent, epsilon, noise_multiplier_for

_POINTS = 4
_LEAST_STEPS = 10


@dataclass(frozen=True)
class Plan:
    """A run of DP-SGD as the accountant sees it.

    Attributes:
        num_examples: Examples that batches are drawn from.
        expected_batch_size: Mean number of examples in a step; the sum of their gradients is divided by it.
        steps: Of the whole run.
        noise_multiplier: Standard deviation of the noise over ``max_grad_norm``.
        max_grad_norm: Norm to which an example's gradient is clipped.
        target_delta: At which epsilon is told.
    """

    num_examples: int
    expected_batch_size: int
    steps: int
    noise_multiplier: float
    max_grad_norm: float
    target_delta: float

    @property
    def sampling_probability(self) -> float:
        """With which an example is in a step, whatever the others are."""
        return self.expected_batch_size / self.num_examples

    def event(self, steps: int | None = None) -> NoiseEvent:
        """So many steps (by default all) for the accountant."""
        return NoiseEvent(
            noise_multiplier=self.noise_multiplier,
            sampling_probability=self.sampling_probability,
            count=self.steps if steps is None else steps,
        )

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon of so many steps, by default of all of them; at ``target_delta``."""
        return epsilon([self.event(steps)], self.target_delta)

    def epsilon_at_most(self, step: int) -> float:
        """An upper bound on ``epsilon(step)`` that is cheap to ask for after every step: it rises a few times a run."""
        every = max(_LEAST_STEPS, math.ceil(self.steps / _POINTS))
        return self.epsilon(min(self.steps, every * math.ceil(step / every)))


def make_plan(config: TrainingConfig, num_examples: int) -> Plan:
    """The plan of a run whose config has ``privacy``.

    Raises:
        GymError: ``CONFIG_INVALID`` when there are fewer examples than a step shall see, or when no noise reaches
            ``target_epsilon``; ``MISSING_DEPENDENCY``.
    """
    privacy = config.privacy
    assert privacy is not None
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if batch > num_examples:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"per_device_train_batch_size x gradient_accumulation_steps is {batch}: a step would see more than the "
            f"{num_examples} examples that there are",
            "lower them: privacy comes from seeing a small share of the examples in a step",
        )
    steps = config.max_steps or math.ceil(config.num_train_epochs * num_examples / batch)
    return Plan(
        num_examples=num_examples,
        expected_batch_size=batch,
        steps=steps,
        noise_multiplier=_noise_multiplier(privacy, batch / num_examples, steps),
        max_grad_norm=privacy.max_grad_norm,
        target_delta=privacy.target_delta,
    )


def _noise_multiplier(privacy: TrainingPrivacy, sampling_probability: float, steps: int) -> float:
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.target_epsilon is not None  # one of both is given
    return noise_multiplier_for(
        privacy.target_epsilon, privacy.target_delta, sampling_probability=sampling_probability, count=steps
    )
