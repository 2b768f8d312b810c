"""Warn at the end of a run that has learned nothing from its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gym_fed.config.train.training import TrainingConfig

_MANY_TRUNCATED = 0.5
_MANY_FLAT = 0.5
_LEARNED = 0.1
"""Rise of the mean reward from a run's first half to its second above which equal rewards cause no warning."""


def reward_warnings(config: TrainingConfig, history: Sequence[dict[str, float]]) -> list[str]:
    """Return warnings about rewards, with remedies, from the log; empty for algorithms without rewards.

    Args:
        config: The run's config.
        history: The trainer's log entries. GRPO and similar algorithms log ``completions/clipped_ratio``, and
            ``frac_reward_zero_std``, the fraction of prompts whose answers all got the same reward. ``reward_std`` is
            not a substitute, since TRL computes it over the answers to all prompts.
    """
    warnings = []
    ratio, equal = "completions/clipped_ratio", "frac_reward_zero_std"
    clipped = [entry[ratio] for entry in history if ratio in entry]
    flat = [entry[equal] for entry in history if equal in entry]
    section = config.chosen_sections().get(config.algorithm)
    limit = getattr(section, "max_completion_length", None)
    if clipped and limit is not None and (share := fmean(clipped)) > _MANY_TRUNCATED:
        warnings.append(
            f"{share:.0%} of the answers were truncated at {config.algorithm}.max_completion_length = {limit}, so "
            "their rewards mean little; raise it, or ask for shorter answers"
        )
    has_groups = getattr(section, "num_generations", 1) > 1  # PPO generates one answer per prompt
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    half = len(rewards) // 2
    has_learned = half > 0 and fmean(rewards[half:]) - fmean(rewards[:half]) > _LEARNED
    if flat and has_groups and not has_learned and (share := fmean(flat)) > _MANY_FLAT:
        warnings.append(
            f"for {share:.0%} of the prompts, all answers got the same reward, so nothing is learned from them; check "
            f"the graders with gym grade, raise {config.algorithm}.num_generations or temperature, or "
            "use prompts that the model sometimes answers correctly"
        )
    return warnings
