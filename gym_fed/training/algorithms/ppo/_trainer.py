"""PPO over TRL's ``GRPOTrainer``: its rollouts and its clipped loss, with advantages for every token from a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from transformers import TrainerCallback
from trl.models.utils import disable_gradient_checkpointing

from gym_fed.config.algorithms.reinforcement import PpoSettings
from gym_fed.training.algorithms.grpo._trainers import GrpoRollouts
from gym_fed.training.algorithms.ppo._critic import Critic
from gym_fed.training.algorithms.ppo._gae import generalised_advantages, token_rewards

_FILE = "critic.safetensors"


class PpoTrainer(GrpoRollouts):
    """The policy learns as in Schulman et al. 2017, equation 7, the critic by its clipped squared error to the returns.

    Args:
        critic: Trained in the same step as the policy, in a parameter group of its own.
        settings: The section ``ppo``.
        arguments: As for ``GRPOTrainer``.
    """

    def __init__(self, *arguments: Any, critic: Critic, settings: PpoSettings, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.settings = settings
        self.kl_weight = 0.0
        self.critic = self.accelerator.prepare_model(critic.eval())
        self._rewards_by_grader: torch.Tensor | None = None
        self.add_callback(_CriticSteps(self))

    def use_reference(self, beta: float, reference: Any | None) -> None:
        """The penalty is in the rewards, so TRL's loss has none."""
        super().use_reference(beta, reference)
        self.kl_weight, self.beta = beta, 0.0

    def create_optimizer(self, model: Any = None) -> Any:
        """The policy's optimiser, with the critic's weights in it."""
        optimizer = super().create_optimizer(model)
        weights = [p for p in self.critic.parameters() if p.requires_grad]
        if not any(p is weights[0] for existing in optimizer.param_groups for p in existing["params"]):
            group = {
                "params": weights,
                "lr": self.settings.critic_learning_rate or self.args.learning_rate,
                "weight_decay": self.args.weight_decay,
            }
            plain = [existing for existing in optimizer.param_groups if existing.get("use_muon") is False]
            if (
                plain
            ):  # Muon's defaults are of its own groups: the critic is moved as embeddings and norms are
                group = {**{key: value for key, value in plain[0].items() if key != "params"}, **group}
            optimizer.add_param_group(group)
        return optimizer

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*arguments, **named)
        self._rewards_by_grader = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Answers with, for every token, its advantage, its return and the critic's value; each ``[B, T]``."""
        self.beta = self.kl_weight  # so that TRL asks the reference, too
        try:
            batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.beta = 0.0
        settings, mask = self.settings, batch["completion_mask"]
        with torch.no_grad():
            values = self._values(batch)
        log_ratios = torch.zeros_like(values)
        if self.kl_weight:
            log_ratios = self._old_log_probs(batch) - batch.pop("ref_per_token_logps")
            self._log("kl", self._mean(log_ratios, mask))
        rewards = token_rewards(self._scores(len(inputs)), log_ratios, mask, beta=self.kl_weight)
        advantages, returns = generalised_advantages(
            rewards, values, mask, gamma=settings.gamma, gae_lambda=settings.gae_lambda
        )
        self._log("value", self._mean(values, mask))
        self._log("return", self._mean(returns, mask))
        spread = self._variance(returns, mask)
        if spread > 0:
            self._log("explained_variance", 1 - self._variance(returns - values, mask) / spread)
        if settings.whiten_advantages:
            centred = advantages - self._mean(advantages, mask)
            advantages = centred * (self._variance(advantages, mask) + 1e-8).rsqrt() * mask
        return {**batch, "advantages": advantages, "returns": returns, "old_values": values}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's clipped loss of the policy and half the critic's squared error, both means over the step's tokens."""
        policy_loss: torch.Tensor = super()._compute_loss(model, inputs)
        mask, old, returns = inputs["completion_mask"], inputs["old_values"], inputs["returns"]
        values = self._values(inputs)
        reach = self.settings.cliprange_value
        clipped = old + (values - old).clamp(-reach, reach)
        errors = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
        self._log("value_loss", self._mean(errors.detach(), mask))
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:  # the count is of a whole generation: scaled as TRL's "dapo" does
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        value_loss: torch.Tensor = (errors * mask).sum() / tokens
        return policy_loss + value_loss

    def _values(self, batch: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        values: torch.Tensor = self.critic(ids, mask, batch["completion_ids"].shape[1])
        return values

    def _old_log_probs(self, batch: dict[str, Any]) -> torch.Tensor:
        """The policy's at the time of the answers; TRL leaves them out where its own loss can do without."""
        if "old_per_token_logps" not in batch:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            with torch.no_grad(), disable_gradient_checkpointing(self.model):
                batch["old_per_token_logps"], _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    ids,
                    mask,
                    batch["completion_ids"].shape[1],
                    self.args.per_device_train_batch_size,
                )
        log_probs: torch.Tensor = batch["old_per_token_logps"]
        return log_probs

    def _scores(self, count: int) -> torch.Tensor:
        """The clipped sum of all graders for this process's answers, ``[count]``."""
        assert self._rewards_by_grader is not None  # they were just generated
        scores = self._rewards_by_grader.sum(dim=1)
        if self.settings.reward_clip_range is not None:
            scores = scores.clamp(*self.settings.reward_clip_range)
        start = self.accelerator.process_index * count
        return scores[start : start + count]

    def _mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Over the tokens of all processes."""
        sums = torch.stack([(values * mask).sum(), mask.sum().to(values.dtype)])
        total, count = self.accelerator.reduce(sums, reduction="sum")
        mean: torch.Tensor = total / count.clamp(min=1)
        return mean

    def _variance(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self._mean((values - self._mean(values, mask)).square(), mask)

    def _log(self, name: str, value: torch.Tensor) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value.item())

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            save_model(self.accelerator.unwrap_model(self.critic), str(Path(output_dir) / _FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_model(self.accelerator.unwrap_model(self.critic), str(Path(resume_from_checkpoint) / _FILE))


class _CriticSteps(TrainerCallback):
    """transformers clips and clears the policy's gradients alone."""

    def __init__(self, trainer: PpoTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip the critic's gradients as the policy's are, each by its own norm."""
        if args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._trainer.critic.parameters(), args.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimiser has moved the critic."""
        self._trainer.critic.zero_grad(set_to_none=True)
