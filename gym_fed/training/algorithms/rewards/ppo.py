"""Proximal policy optimisation: a critic estimates the value of each token, and policy updates are clipped.

The loss is ``-L_CLIP + L_VF - entropy_coef * S``, a mean over tokens: Schulman et al. 2017, "Proximal Policy
Optimization Algorithms", equation 9. Its parts, in the order of a step:

1. ``token_rewards``: the graders' reward, minus the penalty that keeps the policy near the initial model.
2. ``generalised_advantages``: the advantage ``A`` and return ``R`` of each token.
3. ``clipped_objective``: ``L_CLIP``.
4. ``value_loss``: ``L_VF``, the critic's loss.

``_ppo_trainer`` defines and combines them; ``S`` is the entropy of the policy's distribution.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import OPTIMIZERS, TUNING
from gym_fed.training.algorithms.rewards._rewarded import Rewarded, prompts_per_generation
from gym_fed.training.run.job import Job


class Ppo(Rewarded):
    """PPO on TRL's rollouts; a reward model may be one of the graders or the only grader."""

    name = "ppo"
    tried = "full, LoRA, LoRA on vLLM; its own critic, or the body of a reward model"
    untried = "several processes"

    def check(self, config: TrainingConfig) -> None:
        super().check(config)
        settings = self.settings(config)
        strategy = config.distributed_strategy
        # The policy's optimiser also updates the critic, so it must not depend on the layers of a single model.
        optimizer = OPTIMIZERS.new(config.optimizer)
        conflict = TUNING.type_of(config.finetuning).own_optimizer(config)
        if optimizer.of_one_model:
            conflict = f"optimizer: {config.optimizer} {optimizer.of_one_model}"
        answers = prompts_per_generation(self.name, settings, config) * settings.num_generations
        no_critic = "ppo.critic: required, since the body of a quantised policy cannot be copied"
        split = f"distributed.strategy: {strategy} can shard only one model, but ppo trains two"
        single = "per_device_train_batch_size: a generation has only one answer, so there is nothing to compare it with"
        another = "or grpo, which needs no critic"
        refuse_first(
            (
                config.quantization and settings.critic is None,
                no_critic,
                "set it to a model with the same tokenizer",
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
        """Count the reference and the critic, whose body is frozen if ``train_critic_body`` is false."""
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
        # TRL refuses groups of one answer, from which GRPO could not learn, so the number is set after its check.
        named["num_generations"] = settings.num_generations * prompts
        arguments = GRPOConfig(**named, loss_type="dapo", scale_rewards="none")
        arguments.num_generations = settings.num_generations
        train_body = settings.train_critic_body
        if settings.critic is None:
            critic = critic_like(job.model, train_body=train_body)
            if job.config.base_dtype is not None:
                critic = critic.float()  # all weights of the critic are trained
        else:
            critic = load_critic(settings.critic, job.model, dtype=job.config.dtype, train_body=train_body)
        return build_trainer(PpoTrainer, job, arguments, settings.beta, critic=critic, settings=settings)

    def save(self, trainer: Any, folder: Path) -> None:
        """Save the critic in the folder ``critic``, which a later run may specify in ``ppo.critic``."""
        trainer.accelerator.unwrap_model(trainer.critic).save_pretrained(folder / "critic")
