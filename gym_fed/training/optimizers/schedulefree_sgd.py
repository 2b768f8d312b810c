"""SGD with momentum, schedule-free; Defazio et al. 2024, "The Road Less Scheduled"."""

from __future__ import annotations

from gym_fed.training.optimizers._schedule_free import ScheduleFree


class ScheduleFreeSgd(ScheduleFree):
    """``schedulefree.SGDScheduleFree``."""

    def __init__(self) -> None:
        super().__init__(
            "schedulefree:SGDScheduleFree", betas=False, learning_rate_scale=None, state_values=1.0
        )
