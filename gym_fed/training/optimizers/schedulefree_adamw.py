"""AdamW, schedule-free; Defazio et al. 2024, "The Road Less Scheduled", algorithm 1."""

from __future__ import annotations

from gym_fed.training.optimizers._schedule_free import ScheduleFree


class ScheduleFreeAdamW(ScheduleFree):
    """``schedulefree.AdamWScheduleFree``."""

    def __init__(self) -> None:
        super().__init__("schedulefree:AdamWScheduleFree")
