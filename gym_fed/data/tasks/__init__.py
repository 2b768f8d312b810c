"""Generated text tasks with a measurable answer, one module a family, in one registry."""

from gym_fed.data.tasks.registry import (
    Task,
    all_tasks,
    generate,
    generate_mix,
    generate_with_rehearsal,
    get_task,
    is_heldout,
)

__all__ = [
    "Task",
    "all_tasks",
    "generate",
    "generate_mix",
    "generate_with_rehearsal",
    "get_task",
    "is_heldout",
]
