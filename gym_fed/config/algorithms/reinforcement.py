"""Settings of the algorithms that generate answers and learn from their rewards; names are TRL's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel


class RolloutSettings(StrictModel):
    """Settings of generated answers, and of how often they are learned from."""

    num_generations: int = Field(default=8, ge=2)
    """Answers to each prompt; the batch must be a multiple of it."""

    max_completion_length: int = Field(default=64, ge=1)
    """Longest answer in tokens."""

    temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling, and of the probabilities in the loss."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Sample from the N likeliest tokens; 0 = all."""

    min_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from tokens with at least this share of the likeliest token's probability."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    steps_per_generation: int | None = Field(default=None, ge=1)
    """Batches that are generated together before training on them; by default ``gradient_accumulation_steps``."""

    num_iterations: int = Field(default=1, ge=1)
    """Number of updates per answer before new ones are generated."""

    mask_truncated_completions: bool = False
    """Learn nothing from answers that ``max_completion_length`` cut off."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the model at the start; 0 needs no reference model."""

    epsilon: float = Field(default=0.2, gt=0)
    """The ratio of new to old probability is clipped at ``1 - epsilon``."""

    epsilon_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped at ``1 + epsilon_high``; ``epsilon`` if not given."""


class _GroupSettings(RolloutSettings):
    """The common keys of GRPO and GSPO."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Advantages are divided by the rewards' standard deviation in the group of one prompt, in the batch, or not."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus, which keeps the policy exploring."""


class GrpoSettings(_GroupSettings):
    """Group relative policy optimisation, Shao et al. 2024."""

    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo"] = "dapo"
    """Average of the tokens' losses: over each answer and then over answers (``grpo``), over all tokens of the step
    (``dapo``) or of the local batch (``bnpo``), or as a sum over a constant length (``dr_grpo``)."""


class GspoSettings(_GroupSettings):
    """Group sequence policy optimisation, Zheng et al. 2025: importance ratios of whole sequences."""

    epsilon: float = Field(default=3e-4, gt=0)
    epsilon_high: float | None = Field(default=4e-4, gt=0)


class RlooSettings(RolloutSettings):
    """REINFORCE leave-one-out, Ahmadian et al. 2024; ``beta`` is subtracted from the reward here."""

    normalize_advantages: bool = False
    """Give the advantages of a generation mean 0 and standard deviation 1."""

    reward_clip_range: tuple[float, float] | None = None
    """Rewards are clipped to ``[low, high]``."""

    @model_validator(mode="after")
    def _validate_order(self) -> RlooSettings:
        _require_range(self.reward_clip_range)
        return self


class PpoSettings(RolloutSettings):
    """Proximal policy optimisation with a critic and GAE, Schulman et al. 2017 and 2016.

    ``beta`` is subtracted from every token's reward here (Ziegler et al. 2019).
    """

    num_generations: int = Field(default=1, ge=1)
    num_iterations: int = Field(default=4, ge=1)
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a reward for each token between."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """0 relies on the critic, 1 on observed rewards."""

    whiten_advantages: bool = True
    """Give the advantages of a generation mean 0 and standard deviation 1."""

    reward_clip_range: tuple[float, float] | None = None
    """Rewards are clipped to ``[low, high]``."""

    cliprange_value: float = Field(default=0.2, gt=0)
    """Maximum change of a value in one round of iterations."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus, which keeps the policy exploring."""

    critic: str | None = None
    """A model name or folder (a reward model, or the ``critic`` folder of a finished run) whose body the critic starts
    from; it must have the policy's vocabulary. By default a copy of the policy's own body."""

    critic_learning_rate: float | None = Field(default=None, gt=0)
    """By default ``learning_rate``."""

    train_critic_body: bool = True
    """False trains the critic's value head alone."""

    @model_validator(mode="after")
    def _validate_order(self) -> PpoSettings:
        _require_range(self.reward_clip_range)
        return self


def _require_range(clip: tuple[float, float] | None) -> None:
    if clip is not None and clip[0] >= clip[1]:
        raise ValueError(f"reward_clip_range: {clip[0]} is not below {clip[1]}")
