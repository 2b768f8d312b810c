"""RAdam, schedule-free; it warms up by itself. Defazio et al. 2024, "The Road Less Scheduled"."""

from __future__ import annotations

from gym_fed.training.optimizers._schedule_free import ScheduleFree


class ScheduleFreeRAdam(ScheduleFree):
    """``schedulefree.RAdamScheduleFree``."""

    def __init__(self) -> None:
        super().__init__("schedulefree:RAdamScheduleFree", warms_up=False)
