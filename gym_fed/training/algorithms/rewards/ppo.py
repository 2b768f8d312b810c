"""Proximal policy optimisation: a critic estimates the value of each token, and the policy moves by clipped ratios.

The loss is ``-L_CLIP + L_VF - entropy_coef * S``, a mean over tokens: Schulman et al. 2017, "Proximal Policy
Optimization Algorithms", equation 9. Its parts, in the order of a step:

1. ``token_rewards``: the graders' reward, less the penalty that keeps the policy near the initial model.
2. ``generalised_advantages``: the advantage ``A`` and return ``R`` of each token.
3. ``clipped_objective``: ``L_CLIP``.
4. ``value_loss``: ``L_VF``, the critic's loss.

``_ppo_trainer.PpoTrainer`` combines them; ``S`` is the entropy of the policy's distribution.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import OPTIMIZERS, TUNING
from gym_fed.training.algorithms.rewards._rewarded import Rewarded, prompts_per_generation
from gym_fed.training.run.job import Job

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(Rewarded):
    """PPO on TRL's rollouts; a reward model may be one of the graders, or the only one."""

    name = "ppo"
    tried = "full, LoRA; critic of its own or a reward model's body"
    untried = "several processes"

    def check(self, config: TrainingConfig) -> None:
        super().check(config)
        settings = self.settings(config)
        strategy = config.distributed_strategy
        # The critic's weights are a group of the policy's optimiser, which must not depend on one model's
        # layers.
        optimizer = OPTIMIZERS.new(config.optimizer)
        conflict = TUNING.type_of(config.finetuning).own_optimizer(config)
        if optimizer.of_one_model:
            conflict = f"optimizer: {config.optimizer} {optimizer.of_one_model}"
        answers = prompts_per_generation(self.name, settings, config) * settings.num_generations
        no_critic = "ppo.critic: not given, and a quantised policy's body cannot be copied for it"
        split = f"distributed.strategy: {strategy} splits one model, and ppo trains two"
        single = "per_device_train_batch_size: one answer in a generation has nothing to be compared with"
        another = "or grpo, which needs no critic"
        refuse_first(
            (
                config.quantization and settings.critic is None,
                no_critic,
                "name a model with the same tokenizer",
            ),
            (
                conflict is not None,
                f"{conflict}, and ppo also trains a critic",
                f"use optimizer: adamw without lora.lora_fa, {another}",
            ),
            (strategy != "ddp", split, f"use ddp, {another}"),
            (answers < 2, single, "raise it, gradient_accumulation_steps or ppo.steps_per_generation"),
        )

    @classmethod
    def beside(cls, config: TrainingConfig, *, adapted: bool) -> tuple[int, int]:
        """Count the critic, whose body is trained unless that is switched off."""
        frozen, _ = super().beside(config, adapted=adapted)
        trained = config.chosen_sections()[config.algorithm].train_critic_body
        return (frozen, 1) if trained else (frozen + 1, 0)

    def build(self, job: Job) -> Any:
        from trl import GRPOConfig

        from gym_fed.training.algorithms.rewards._ppo_trainer import PpoTrainer
        from gym_fed.training.algorithms.rewards._rollouts import build_trainer
        from gym_fed.training.model.critic import critic_like, load_critic

        settings = self.settings(job.config)
        named = self.arguments(job, "entropy_coef")
        prompts = prompts_per_generation(self.name, settings, job.config)
        # TRL refuses groups of one, from which GRPO could not learn, so the number is set after its check.
        arguments = GRPOConfig(
            **{**named, "num_generations": settings.num_generations * prompts},
            loss_type="dapo",
            scale_rewards="none",
        )
        arguments.num_generations = settings.num_generations
        train_body = settings.train_critic_body
        if settings.critic is None:
            critic = critic_like(job.model, train_body=train_body)
            if job.config.base_dtype is not None:
                critic = critic.float()  # all its weights are trained
        else:
            critic = load_critic(settings.critic, job.model, dtype=job.config.dtype, train_body=train_body)
        return build_trainer(PpoTrainer, job, arguments, settings.beta, critic=critic, settings=settings)

    def save(self, trainer: Any, folder: Path) -> None:
        """Save the critic in the folder ``critic``, which ``ppo.critic`` of a later run may name."""
        trainer.accelerator.unwrap_model(trainer.critic).save_pretrained(folder / "critic")


def token_rewards(scores: Tensor, log_ratios: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """Return ``-beta * log(pi / pi_ref)`` at every token, plus the answer's score at its last token.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2, token by token.

    Args:
        scores: ``[B]``, of whole answers.
        log_ratios: ``[B, T]``, log-probability under the policy less that under the reference.
        mask: ``[B, T]``, 1 at tokens and 0 at the padding after them.
        beta: Weight of the penalty.

    Returns:
        ``[B, T]``, 0 at the padding.
    """
    mask = mask.to(scores.dtype)
    rewards = -beta * log_ratios * mask
    last = mask.sum(dim=1).long().sub(1).clamp(min=0).unsqueeze(1)
    return rewards.scatter_add(1, last, scores.unsqueeze(1) * mask.gather(1, last))


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return the advantage and the return of each token.

    ``A[t] = delta[t] + gamma * lambda * A[t + 1]`` with ``delta[t] = rewards[t] + gamma * values[t + 1] -
    values[t]``; after the last token all are 0. Schulman et al. 2016, "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", equation 16 as a recursion.

    Args:
        rewards: ``[B, T]``, given for each token.
        values: ``[B, T]``, the critic's estimate before each token.
        mask: ``[B, T]``, 1 at tokens and 0 at the padding after them.
        gamma: Discount of later rewards.
        gae_lambda: 0 is ``delta`` alone, 1 the sum of all future rewards minus the value.

    Returns:
        Advantages and returns (advantage + value), each ``[B, T]`` in the type of ``rewards``; 0 at the padding.
    """
    import torch

    mask = mask.to(rewards.dtype)
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(rewards)
    ahead = next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = (delta + gamma * gae_lambda * ahead) * mask[:, t]
        advantages[:, t] = ahead
        next_value = values[:, t]
    return advantages, advantages + values


def clipped_objective(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float
) -> Tensor:
    """``L_CLIP = min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)`` with ``r = pi / pi_old``.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; it is maximised.

    Args:
        log_probs: ``[B, T]`` of the answers' tokens under the policy.
        old_log_probs: The same under the policy that wrote the answers.
        advantages: ``[B, T]``.
        epsilon: Distance below 1 at which the ratio loses its gradient.
        epsilon_high: Distance above 1 at which it does.

    Returns:
        ``[B, T]``.
    """
    import torch

    ratios = (log_probs - old_log_probs).exp()
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    return torch.minimum(ratios * advantages, clipped * advantages)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float) -> Tensor:
    """``L_VF = max((V - R)**2, (clip(V, V_old - c, V_old + c) - R)**2) / 2``.

    The squared error of Schulman et al. 2017, equation 9, clipped as in the authors' ``baselines`` (``ppo2``).

    Args:
        values: ``[B, T]`` of the critic.
        old_values: The same when the answers were written.
        returns: ``[B, T]``: advantages plus old values.
        cliprange: ``c``.

    Returns:
        ``[B, T]``.
    """
    import torch

    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
