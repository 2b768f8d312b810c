"""Reinforcement learning with a grader of your own: gym-nano learns to answer an unknown task in short words.

python examples/grpo.py [FOLDER]       # half a minute on one core
"""

import sys

from gym_fed.data import generate
from gym_fed.training.loops import GRPO, StringThread
from gym_fed.training.recipe import RecipeContext

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/examples/grpo"


def short(thread: StringThread) -> float:
    """1 for an answer of at most two characters; less for each one more."""
    role, text = thread.turns[-1]
    assert role == "assistant"
    return max(0.0, 1.0 - max(0, len(text) - 2) / 6)


prompts = [StringThread.of_row(row) for row in generate("twice", 64)]
with RecipeContext(folder, seed=0) as context:
    policy = context.spawn_train("gym-nano")
    GRPO(
        prompts,
        policy,
        short,
        lr=1e-3,
        samples_per_batch=8,
        completions_per_sample=4,
        max_completion_length=12,
        max_steps=8,
        context=context,
        settings={"max_length": 32, "logging_steps": 1},
    ).run()
    print("saved in", context.save_model_safely("short", policy))
