"""Settings of the algorithms that generate answers and learn from rewards for them, named as in TRL."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.vllm import VllmConnection
from gym_fed.core.addresses import is_loopback


class RolloutEngine(VllmConnection):
    """A vLLM server that generates the answers, in its own process or on another machine; for ``finetuning: lora``."""

    engine: Literal["vllm"] = "vllm"
    """Program that generates the answers. ``rollouts: vllm`` sets only this."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of weights and activations in a vLLM that gym-fed starts; by default the run's ``dtype``."""

    max_staleness: int = Field(default=0, ge=0, le=16)
    """Maximum age of the policy that generates answers, in generations. Above 0, vLLM answers the next prompts
    while the model trains."""

    correction: Literal["truncated", "none"] = "truncated"
    """Correction for answers from an older policy or different arithmetic: each term of the loss is weighted by
    the ratio of the model's probability to vLLM's, at most ``cap`` (truncated importance sampling, Yao et al. 2025).
    Per token for ``grpo`` and ``ppo``, per answer for ``gspo`` and ``rloo``."""

    cap: float = Field(default=2.0, ge=1)
    """Maximum importance weight."""

    @model_validator(mode="after")
    def _validate_combination(self) -> RolloutEngine:
        if self.max_staleness and self.correction == "none":
            raise ValueError(f"max_staleness: {self.max_staleness} needs correction: truncated")
        if self.correction == "none" and self.cap != type(self).model_fields["cap"].default:
            raise ValueError(f"cap: {self.cap:g} applies only to correction: truncated")
        if self.url is None:
            if self.api_key_file is not None:
                raise ValueError("api_key_file applies only to a running vLLM; set url as well")
            return self
        for name in ("python", "args", "tensor_parallel_size", "start_seconds", "dtype"):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(
                    f"{name} applies only to a vLLM that gym-fed starts, but url names a running one"
                )
        if not is_loopback(self.url) and (self.api_key_file is None or self.url.startswith("http:")):
            raise ValueError(f"url: {self.url} is not on this machine; use https and api_key_file")
        return self


def _engine_of_name(value: Any) -> Any:
    return {"engine": value} if isinstance(value, str) else value


class RolloutSettings(StrictModel):
    """Settings of answer generation, and of the number of updates per answer."""

    num_generations: int = Field(default=8, ge=2)
    """Number of answers per prompt; the batch must be a multiple of it."""

    max_completion_length: int = Field(default=64, ge=1)
    """Maximum number of tokens per answer."""

    temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling, and of the probabilities in the loss."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Sample from the N most likely tokens; 0 = all."""

    min_p: float | None = Field(default=None, gt=0, le=1)
    """Minimum probability of sampled tokens, as a fraction of the most likely token's."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    steps_per_generation: int | None = Field(default=None, ge=1)
    """Batches that are generated together before training on them; by default ``gradient_accumulation_steps``."""

    num_iterations: int = Field(default=1, ge=1)
    """Number of updates per answer before new ones are generated."""

    mask_truncated_completions: bool = False
    """Exclude answers truncated by ``max_completion_length`` from the loss."""

    rollouts: Annotated[RolloutEngine, BeforeValidator(_engine_of_name)] | None = None
    """The vLLM that generates the answers; by default the trained model does, in this process."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the initial model; 0 needs no reference model."""

    epsilon: float = Field(default=0.2, gt=0)
    """Distance below 1 at which the ratio of new to old probability is clipped."""

    epsilon_high: float | None = Field(default=None, gt=0)
    """Distance above 1 at which the ratio is clipped; by default ``epsilon``."""


class _GroupSettings(RolloutSettings):
    """The common settings of GRPO and GSPO."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of advantages: the rewards' standard deviation per prompt (``group``) or per batch, or none."""

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
    """Normalise the advantages of a generation to mean 0 and standard deviation 1."""

    reward_clip_range: tuple[float, float] | None = None
    """Range ``[low, high]`` to which rewards are clipped."""

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
    """Discount factor of rewards per token."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of GAE: 0 relies on the critic, 1 on observed rewards."""

    whiten_advantages: bool = True
    """Normalise the advantages of a generation to mean 0 and standard deviation 1."""

    reward_clip_range: tuple[float, float] | None = None
    """Range ``[low, high]`` to which rewards are clipped."""

    cliprange_value: float = Field(default=0.2, gt=0)
    """Maximum change of a value in one round of iterations."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus, which keeps the policy exploring."""

    critic: str | None = None
    """Model name or folder (a reward model, or the ``critic`` folder of a finished run) whose body the critic starts
    from; it must have the policy's vocabulary. By default a copy of the policy's own body."""

    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of the critic; by default ``learning_rate``."""

    train_critic_body: bool = True
    """True to train the critic's body, False to train only its value head."""

    @model_validator(mode="after")
    def _validate_order(self) -> PpoSettings:
        _require_range(self.reward_clip_range)
        return self


def _require_range(clip: tuple[float, float] | None) -> None:
    if clip is not None and clip[0] >= clip[1]:
        raise ValueError(f"reward_clip_range: {clip[0]} is not below {clip[1]}")
