"""Warnings about runs of rewards that could not learn: answers cut off, or rewards that are all equal."""

from __future__ import annotations

from collections.abc import Sequence

from gym_fed.config.train.training import TrainingConfig

_MANY_TRUNCATED = 0.5
_NO_SPREAD = 1e-6


def reward_warnings(config: TrainingConfig, history: Sequence[dict[str, float]]) -> list[str]:
    """Return warnings from the log, with remedies; empty for algorithms without rewards.

    Args:
        config: The run's config.
        history: What the trainer logged at each step: of GRPO and its kin ``completions/clipped_ratio`` and
            ``reward_std``.
    """
    warnings = []
    clipped = [
        entry["completions/clipped_ratio"] for entry in history if "completions/clipped_ratio" in entry
    ]
    spread = [entry["reward_std"] for entry in history if "reward_std" in entry]
    section = config.chosen_sections().get(config.algorithm)
    limit = getattr(section, "max_completion_length", None)
    if clipped and limit is not None and (share := sum(clipped) / len(clipped)) > _MANY_TRUNCATED:
        warnings.append(
            f"{share:.0%} of the answers were cut at {config.algorithm}.max_completion_length = {limit}, so their "
            f"rewards say little; raise it, or ask for shorter answers"
        )
    if spread and (flat := sum(value <= _NO_SPREAD for value in spread)) > _MANY_TRUNCATED * len(spread):
        warnings.append(
            f"in {flat} of {len(spread)} steps all answers to a prompt got the same reward, from which nothing is "
            f"learned; look at the graders with gym grade, raise {config.algorithm}.num_generations or temperature, "
            "or take prompts that the model sometimes gets right"
        )
    return warnings
