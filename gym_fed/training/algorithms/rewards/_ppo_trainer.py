"""Train PPO with TRL's ``GRPOTrainer``, which generates the answers, and per-token advantages from a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from transformers import TrainerCallback
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import nanmax, nanmin

from gym_fed.config.algorithms.reinforcement import PpoSettings
from gym_fed.training.algorithms.rewards._rollouts import GrpoRollouts
from gym_fed.training.model.critic import Critic

_FILE = "critic.safetensors"


class PpoTrainer(GrpoRollouts):
    """A trainer that updates policy and critic in the same step, with the loss of ``_compute_loss``.

    Args:
        critic: The critic, which becomes a separate parameter group of the policy's optimiser.
        settings: The ``ppo`` section of the config.
        arguments: Arguments of ``GRPOTrainer``.
    """

    def __init__(self, *arguments: Any, critic: Critic, settings: PpoSettings, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.settings = settings
        self.kl_weight = 0.0
        self.critic = self.accelerator.prepare_model(critic.eval())
        self.add_callback(_CriticSteps(self))

    def use_reference(self, beta: float, reference: Any | None) -> None:
        """Use the reference for the penalty in the rewards instead of in TRL's loss."""
        super().use_reference(beta, reference)
        self.kl_weight, self.beta = beta, 0.0

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the policy's optimiser, and add the critic's weights to it."""
        optimizer = super().create_optimizer(model)
        weights = [p for p in self.critic.parameters() if p.requires_grad]
        if not any(p is weights[0] for existing in optimizer.param_groups for p in existing["params"]):
            group = {
                "params": weights,
                "lr": self.settings.critic_learning_rate or self.args.learning_rate,
                "weight_decay": self.args.weight_decay,
            }
            plain = [existing for existing in optimizer.param_groups if existing.get("use_muon") is False]
            if plain:  # under Muon, AdamW updates the critic, like embeddings and norms
                group = {**{key: value for key, value in plain[0].items() if key != "params"}, **group}
            optimizer.add_param_group(group)
        return optimizer

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return generated answers with the advantage, return and value estimate of each token, each ``[B, T]``."""
        self.beta = self.kl_weight  # makes TRL score the answers with the reference, too
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
        """Return the mean of ``-L_CLIP + L_VF - entropy_coef * S`` over tokens (Schulman et al. 2017, equation 9)."""
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        log_probs, entropies, router_loss = self._policy(model, inputs)
        old_log_probs = inputs.get("old_per_token_logps", log_probs.detach())
        objective = clipped_objective(
            log_probs, old_log_probs, advantages, epsilon=self.epsilon_low, epsilon_high=self.epsilon_high
        )
        if (weights := inputs.get("importance_sampling_ratio")) is not None:
            objective = objective * weights
        cliprange = self.settings.cliprange_value
        errors = value_loss(
            self._values(inputs), inputs["old_values"], inputs["returns"], cliprange=cliprange
        )
        tokens = self._step_tokens(inputs)
        if self.entropy_coef:
            self._log_bonus((-objective.detach() * mask).sum() / tokens)
            objective = objective + self.entropy_coef * entropies
        loss: torch.Tensor = (-objective * mask).sum() / tokens + (errors * mask).sum() / tokens
        self._log("value_loss", self._mean(errors.detach(), mask))
        self._log("entropy", self._mean(entropies.detach(), mask))
        self._log_clipping(torch.exp(log_probs.detach() - old_log_probs), advantages, mask)
        return loss if router_loss is None else loss + self._weighted(router_loss)

    def _policy(
        self, model: Any, batch: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities and entropies of the answers' tokens, each ``[B, T]``, and the router loss."""
        ids, mask = _prompts_with_answers(batch)
        options = {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
        length = batch["completion_ids"].shape[1]
        log_probs, entropies, router_loss = self._get_per_token_logps_and_entropies(
            model, ids, mask, length, **options
        )
        return log_probs, entropies, router_loss

    def _step_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return this process's share of the tokens that an optimiser step learns from."""
        tokens: torch.Tensor = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:  # count a whole generation; scaled like TRL's "dapo"
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return tokens

    def _weighted(self, router_loss: torch.Tensor) -> torch.Tensor:
        self._log("aux_loss", self.accelerator.gather_for_metrics(router_loss.detach()).mean())
        batches = self.current_gradient_accumulation_steps if self.model.training else 1
        weighted: torch.Tensor = self.router_aux_loss_coef * router_loss / batches
        return weighted

    def _log_bonus(self, policy_loss: torch.Tensor) -> None:
        self._log("policy_loss", self.accelerator.gather(policy_loss).nanmean())
        if self.model.training and self.accelerator.sync_gradients:
            self._log("entropy_coef", torch.tensor(self.entropy_coef))

    def _log_clipping(self, ratios: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Log the fraction of tokens that the objective clips, under TRL's names."""
        low = (ratios < 1 - self.epsilon_low) & (advantages < 0)
        high = (ratios > 1 + self.epsilon_high) & (advantages > 0)
        for name, clipped in (("low", low), ("high", high), ("region", low | high)):
            self._log(f"clip_ratio/{name}_mean", self._mean(clipped.float(), mask))
        for name, clipped, extreme in (("low_min", low, nanmin), ("high_max", high, nanmax)):
            by_answer = self.accelerator.gather((clipped * mask).sum(dim=1) / mask.sum(dim=1))
            self._log(f"clip_ratio/{name}", extreme(by_answer))

    def _values(self, batch: dict[str, Any]) -> torch.Tensor:
        ids, mask = _prompts_with_answers(batch)
        values: torch.Tensor = self.critic(ids, mask, batch["completion_ids"].shape[1])
        return values

    def _old_log_probs(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the policy's log-probabilities at generation, which TRL omits if its loss does not need them."""
        if "old_per_token_logps" not in batch:
            ids, mask = _prompts_with_answers(batch)
            length, batch_size = batch["completion_ids"].shape[1], self.args.per_device_train_batch_size
            with torch.no_grad(), disable_gradient_checkpointing(self.model):
                batch["old_per_token_logps"], _, _ = self._get_per_token_logps_and_entropies(
                    self.model, ids, mask, length, batch_size
                )
        log_probs: torch.Tensor = batch["old_per_token_logps"]
        return log_probs

    def _scores(self, count: int) -> torch.Tensor:
        """Return the clipped sum of all graders for this process's answers, ``[count]``."""
        scores = self._rewards_by_grader.sum(dim=1)
        if self.settings.reward_clip_range is not None:
            scores = scores.clamp(*self.settings.reward_clip_range)
        return self._own_rows(scores, count)

    def _mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the mean over the masked tokens of all processes."""
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


def _prompts_with_answers(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of prompts and answers, joined, and the attention mask of both."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


class _CriticSteps(TrainerCallback):
    """A callback that clips and clears the critic's gradients, as transformers does for the policy."""

    def __init__(self, trainer: PpoTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip the critic's gradients by their own norm."""
        if args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._trainer.critic.parameters(), args.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clear the critic's gradients after the optimiser's step."""
        self._trainer.critic.zero_grad(set_to_none=True)


def token_rewards(
    scores: torch.Tensor, log_ratios: torch.Tensor, mask: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """Return ``-beta * log(pi / pi_ref)`` at every token, plus the answer's score at its last token.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2, token by token.

    Args:
        scores: ``[B]``, the score of each answer.
        log_ratios: ``[B, T]``, log-probability under the policy minus that under the reference.
        mask: ``[B, T]``, 1 for tokens and 0 for the padding after them.
        beta: Weight of the penalty.

    Returns:
        ``[B, T]``, 0 for padding.
    """
    mask = mask.to(scores.dtype)
    rewards = -beta * log_ratios * mask
    last = mask.sum(dim=1).long().sub(1).clamp(min=0).unsqueeze(1)
    return rewards.scatter_add(1, last, scores.unsqueeze(1) * mask.gather(1, last))


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantage and the return of each token.

    ``A[t] = delta[t] + gamma * lambda * A[t + 1]`` with ``delta[t] = rewards[t] + gamma * values[t + 1] -
    values[t]``; after the last token all are 0. Schulman et al. 2016, "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", equation 16 as a recursion.

    Args:
        rewards: ``[B, T]``, the reward for each token.
        values: ``[B, T]``, the critic's estimate before each token.
        mask: ``[B, T]``, 1 for tokens and 0 for the padding after them.
        gamma: Discount of later rewards.
        gae_lambda: With 0, the advantage is ``delta``; with 1, the sum of all future rewards minus the value.

    Returns:
        Advantages and returns (advantage + value), each ``[B, T]`` in the dtype of ``rewards``; 0 for padding.
    """
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
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
) -> torch.Tensor:
    """Return ``L_CLIP = min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)`` with ``r = pi / pi_old``.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; it is maximised.

    Args:
        log_probs: ``[B, T]``, log-probabilities of the answers' tokens under the policy.
        old_log_probs: ``[B, T]``, log-probabilities under the policy that generated the answers.
        advantages: ``[B, T]``.
        epsilon: Distance below 1 at which the ratio loses its gradient.
        epsilon_high: Distance above 1 at which the ratio loses its gradient.

    Returns:
        ``[B, T]``.
    """
    ratios = (log_probs - old_log_probs).exp()
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    return torch.minimum(ratios * advantages, clipped * advantages)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, cliprange: float
) -> torch.Tensor:
    """Return ``L_VF = max((V - R)**2, (clip(V, V_old - c, V_old + c) - R)**2) / 2``.

    The squared error of Schulman et al. 2017, equation 9, clipped as in the authors' ``baselines`` (``ppo2``).

    Args:
        values: ``[B, T]``, the critic's estimates.
        old_values: ``[B, T]``, the critic's estimates when the answers were generated.
        returns: ``[B, T]``: advantages plus old values.
        cliprange: ``c``.

    Returns:
        ``[B, T]``.
    """
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
