"""Extend TRL's generating trainers with graders, a reference copied from memory, and exact resume."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import RepeatSampler

from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted
from gym_fed.data.encoding import without_second_bos
from gym_fed.evaluation.environments import STATE, Environment
from gym_fed.evaluation.graders.base import CombinedGrader, Grader, Sample
from gym_fed.training.algorithms.rewards._environments import EnvironmentRollouts
from gym_fed.training.model.output_head import add_output_head
from gym_fed.training.model.reference import copy_at_start, named_reference
from gym_fed.training.rollouts.client import RolloutClient
from gym_fed.training.rollouts.generation import VllmGeneration
from gym_fed.training.rollouts.opening import generate_by_vllm
from gym_fed.training.run.reproducibility import RunWarning
from gym_fed.training.trl_glue import adapter_is_idle, local

if TYPE_CHECKING:
    from gym_fed.training.run.job import Job

_PROBE_TOKENS = 16
_MAX_DIFFERENCE = 0.5
"""Maximum mean difference of log-probabilities per token, in nats. It is 0.05 in bfloat16, and above 1 between
different models."""


_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer
_Grpo: Any = GRPOTrainer  # typed as Any, since TRL's annotations are unreliable
_Rloo: Any = RLOOTrainer


class Rollouts(_Trainer):  # type: ignore[misc]
    """A mix-in for ``GRPOTrainer`` and ``RLOOTrainer``.

    A checkpoint between two uses of the same answers contains the answers, so that a resumed run reuses them and ends
    with the same weights.
    """

    _buffered_inputs: Any
    prompts: Sequence[Any]
    """Set after construction: the prompts, indexed by the dataset's column ``row``."""

    vllm_generation: VllmGeneration
    rollout_client: RolloutClient
    """Set after construction if ``use_vllm`` is on."""

    _resent = 0
    _num_tokens = 0
    """Number of tokens since this process started; the trainer counts those of the whole run."""

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(super()._get_train_sampler(dataset))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state before the trainer's state, whose presence marks the checkpoint as complete."""
        super()._save_rng_state(output_dir)
        every = self.args.steps_per_generation * self.num_iterations
        batches = self._buffered_inputs if self._step % every else []
        tensors = {
            f"{index}.{key}": value.detach().cpu().contiguous().clone()
            for index, batch in enumerate(batches)
            for key, value in batch.items()
            if value is not None
        }
        metadata = {"step": str(self._step), "batches": str(len(batches))}
        save_file(tensors, self._rollouts_file(output_dir), metadata=metadata)
        if self.use_vllm:
            self.vllm_generation.save(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        device = str(self.accelerator.device)
        with safe_open(self._rollouts_file(resume_from_checkpoint), framework="pt", device=device) as file:
            metadata = file.metadata()
            self._step = int(metadata["step"])
            batches: list[dict[str, Any]] = [{} for _ in range(int(metadata["batches"]))]
            for name in file.keys():  # noqa: SIM118 - not a dict
                index, _, key = name.partition(".")
                batches[int(index)][key] = file.get_tensor(name)
        self._buffered_inputs = batches or None
        if self.use_vllm:
            self._last_loaded_step = -1
            self.vllm_generation.load(Path(resume_from_checkpoint))

    def prompts_of_generation(self, generation: int) -> list[list[int]]:
        """Return the token ids of each prompt of a generation, ``[answers]``, before its batch is loaded."""
        sampler = self._get_train_sampler()
        epoch, number = divmod(generation, sampler.num_samples // sampler.batch_size)
        prompts = [self.prompts[index] for index in sampler.group(epoch, number)]
        ids, *_ = self._tokenize_prompts(prompts)
        return [list(each) for each in ids]

    def _require_same_policy(self, difference: float) -> None:
        """Refuse answers from a policy other than the trained one.

        Policies are not compared if sampling truncates or penalises probabilities, since these then always differ.

        Args:
            difference: Mean difference of the tokens' log-probabilities between vLLM and the trained model.
        """
        is_current = self.vllm_generation.version == self.state.global_step
        if is_current and self.rollout_client.samples_whole and not difference <= _MAX_DIFFERENCE:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"vLLM's log-probabilities differ from the trained model's by {difference:.2f} nats per token on "
                "average",
                "serve this run's model with vLLM, with the same weights and chat template",
            )

    def _warn_of_resent(self) -> None:
        if (resent := self.rollout_client.resent) > self._resent:
            again = counted(resent - self._resent, "answer")
            warnings.warn(f"vLLM stopped; requested {again} again", RunWarning, stacklevel=2)
            self._resent = resent

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the tokens since this process started, like TRL's other trainers. Omit times, which vary by run."""
        if self.model.training:
            metrics = self._metrics["train"]
            metrics.pop("step_time", None)
            metrics["num_tokens"] = [self._num_tokens]
        super().log(logs, start_time)

    def _generate(self, prompts: list[Any]) -> Any:
        before = self.state.num_input_tokens_seen
        generated = super()._generate(prompts)
        self._num_tokens += self.state.num_input_tokens_seen - before
        return generated

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Tokenise like TRL, but without a second BOS token for text prompts that already have one."""
        prompt_ids, *rest = super()._tokenize_prompts(prompts)
        return [without_second_bos(self.processing_class, ids) for ids in prompt_ids], *rest

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate like TRL, but from the original prompts: an Arrow table would give all messages the same keys."""
        prompted = [{**row, "prompt": self.prompts[row["row"]]} for row in inputs]
        if (rollouts := getattr(self, "rollout_func", None)) is not None:
            rollouts.row_indices = [row["row"] for row in inputs]
        batch: dict[str, Any] = super()._generate_and_score_completions(prompted)
        if self.use_vllm:
            self._warn_of_resent()
            age = float(self.state.global_step - self.vllm_generation.version)
            self._metrics["train" if self.model.training else "eval"]["rollouts/staleness"].append(age)
        return batch

    def use_reference(self, beta: float, reference: Any | None) -> None:
        """Set the weight ``beta`` of the divergence from a reference; None is the model with its adapter disabled."""
        self.beta = beta
        if reference is not None:
            add_output_head(reference, temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _rollouts_file(self, folder: str) -> Path:
        return Path(folder) / f"rollouts-{self.accelerator.process_index}.safetensors"


class GrpoRollouts(Rollouts, _Grpo):  # type: ignore[misc]
    """The trainer for GRPO and GSPO, which also generates the answers for PPO.

    TRL's losses are means over the step, with two exceptions. ``bnpo`` is by definition a mean over a batch's tokens.
    The entropy bonus is a mean over a batch, which is weighted here by the batch's tokens.
    """

    entropy_coef: float

    advantages: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Set after construction: maps rewards ``[prompts, answers]`` to advantages; None if a subclass computes them."""

    _rewards_by_grader: torch.Tensor

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Return TRL's rewards ``[answers of all processes, graders]``, and store them for the advantages."""
        self._rewards_by_grader = super()._calculate_rewards(*arguments, **named)
        return self._rewards_by_grader

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's generated answers, with advantages ``[B]`` by ``advantages``."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            metrics = self._metrics["train" if self.model.training else "eval"]
            self._require_same_policy(metrics["sampling/sampling_logp_difference/mean"][-1])
        if self.advantages is not None and self.model.training:
            rewards = self._rewards_by_grader.sum(dim=1).view(-1, self.num_generations)
            batch["advantages"] = self._own_rows(self.advantages(rewards).flatten(), len(inputs))
        return batch

    def _own_rows(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Return this process's ``count`` values out of those of all processes."""
        start = self.accelerator.process_index * count
        return values[start : start + count]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        coefficient = self.entropy_coef
        if not coefficient or not self.model.training:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
            return loss
        batches = self.accelerator.num_processes * self.args.steps_per_generation
        tokens = float(inputs["completion_mask"].sum())
        self.entropy_coef = coefficient * tokens * batches / max(float(inputs["num_items_in_batch"]), 1.0)
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.entropy_coef = coefficient
        if logged := self._metrics["train"].get("entropy_coef"):
            logged[-1] = coefficient
        return loss


class RlooRollouts(Rollouts, _Rloo):  # type: ignore[misc]
    """The trainer for RLOO."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's generated answers, multiplying the advantage of answers from vLLM by their importance weights.

        TRL applies this correction only for GRPO.
        """
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.use_vllm or not self.vllm_importance_sampling_correction:
            return batch
        logprobs = self.vllm_generation.logprobs
        sampled = torch.tensor([sum(values) for values in logprobs], device=batch["old_logps"].device)
        lengths = torch.tensor([len(values) for values in logprobs], device=sampled.device)
        in_loss = batch["completion_mask"].any(dim=1)
        log_ratios = (batch["old_logps"] - sampled) * in_loss
        self._require_same_policy(float((log_ratios.abs() / lengths).mean()))
        weights = log_ratios.exp().clamp(max=self.vllm_importance_sampling_clip_max)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["sampling/importance_sampling_ratio/mean"].append(float(weights.mean()))
        return {**batch, "advantages": batch["advantages"] * weights}


class EpochSampler(RepeatSampler):
    """Orders prompts like TRL, but depends only on seed and epoch, so that a resumed run has the same order."""

    def __init__(self, of: RepeatSampler) -> None:
        super().__init__(
            data_source=of.data_source,
            mini_repeat_count=of.mini_repeat_count,
            batch_size=of.batch_size,
            repeat_count=of.repeat_count,
            shuffle=of.shuffle,
            seed=of.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate's dataloader calls this before each epoch."""
        self.generator.manual_seed((self.seed or 0) + epoch)

    def group(self, epoch: int, number: int) -> list[int]:
        """Return the rows of a generation in an epoch (numbered from 0), each repeated as often as it is answered."""
        self.set_epoch(epoch)
        order = torch.randperm(self.num_samples, generator=self.generator)
        rows = order[number * self.batch_size : (number + 1) * self.batch_size]
        return [int(row) for row in rows.repeat_interleave(self.mini_repeat_count)]


def build_trainer(trainer_class: Any, job: Job, arguments: Any, beta: float, **more: Any) -> Any:
    """Build the trainer of ``job``, with its graders.

    Args:
        trainer_class: A subclass of ``Rollouts``.
        job: The run's job, whose graders are set up.
        arguments: The trainer's ``GRPOConfig`` or ``RLOOConfig``, with ``beta`` 0.
        beta: Weight of the KL term; a positive weight requires a reference, see ``reference_of``.
        more: Further keyword arguments of the trainer.
    """
    reference = reference_of(job) if beta else None
    rows = [*job.encoded, *(job.eval_encoded or [])]
    trainer = local(trainer_class)(
        model=job.model,
        reward_funcs=[reward_function(grader, rows) for grader in job.graders],
        args=arguments,
        processing_class=job.tokenizer,
        callbacks=job.callbacks,
        train_dataset=_prompts(job.encoded, 0),
        eval_dataset=None if job.eval_encoded is None else _prompts(job.eval_encoded, len(job.encoded)),
        **more,
    )
    trainer.prompts = [row["prompt"] for row in rows]
    trainer.rollout_func = _environment_rollouts(trainer_class, job, rows, arguments.max_completion_length)
    trainer.use_reference(beta, reference)
    settings = job.config.chosen_sections()[job.config.algorithm]
    if settings.rollouts is not None:
        per_answer = getattr(arguments, "importance_sampling_level", "sequence") == "sequence"
        generate_by_vllm(trainer, job, settings, per_answer=per_answer)
    return trainer


def _environment_rollouts(
    trainer_class: Any, job: Job, rows: Sequence[dict[str, Any]], max_tokens: int
) -> EnvironmentRollouts | None:
    """Return the rollouts of the job's environment; None without one.

    Raises:
        GymError: ``USAGE`` for two environments, an algorithm without environments, plain-text prompts, or a model that
            is sharded across processes.
    """
    environments = [grader for grader in job.graders if isinstance(grader, Environment)]
    if not environments:
        return None
    strategy = job.config.distributed_strategy
    engine = job.config.chosen_sections()[job.config.algorithm].rollouts
    is_ahead = engine is not None and engine.max_staleness > 0
    # With a split model, all processes generate together, so some would hang if conversations had different lengths.
    refuse_first(
        (strategy != "ddp", f"distributed.strategy: {strategy} splits the model, and environments need ddp"),
        (is_ahead, "conversations cannot be generated ahead: set rollouts.max_staleness to 0"),
        (len(environments) > 1, "a run supports only one environment"),
        (trainer_class is not GrpoRollouts, f"{job.config.algorithm} has no environments: use grpo or gspo"),
        (any(isinstance(row["prompt"], str) for row in rows), "environments need prompts that are messages"),
        code=ErrorCode.USAGE,
        prefix=f"graders: {environments[-1].name}: ",
    )
    return EnvironmentRollouts(environments[0], rows, max_tokens)


def reference_of(job: Job) -> Any | None:
    """Return the reference that the config specifies, or a copy of the policy; None if disabling the adapter suffices.

    Disabling suffices if the adapter does not change the model yet, which a forward pass shows. PiSSA, OLoRA and
    continued adapters do change it.
    """
    named = named_reference(job.config, job.model)
    if named is not None:
        return named
    if hasattr(job.model, "peft_config") and adapter_is_idle(job.model, list(range(_PROBE_TOKENS))):
        return None
    return copy_at_start(job.model)


def reward_function(grader: Grader, rows: Sequence[dict[str, Any]]) -> Callable[..., list[float]]:
    """Wrap a grader as a reward function for TRL.

    Two metrics are logged: ``rewards/NAME/mean`` is the grader's contribution to the reward, ``graders/NAME`` its value
    before ``weight`` and ``clip`` (for each part of a ``CombinedGrader``).

    Args:
        grader: The grader, already set up.
        rows: All rows, indexed by the dataset's column ``row``; an answer is graded with the columns of its row.
    """

    def reward(
        completions: list[Any], row: list[int], log_metric: Callable[[str, float], None], **more: Any
    ) -> list[float]:
        states = more.get(STATE) or [None] * len(row)
        samples = [
            _sample(rows[index], completion, state)
            for completion, index, state in zip(completions, row, states, strict=True)
        ]
        rewards = [float(value) for value in grader.grade(samples)]
        if len(rewards) != len(samples) or not all(map(math.isfinite, rewards)):
            reason = f"the grader {grader.name} returned {rewards} for {counted(len(samples), 'answer')}"
            raise GymError(ErrorCode.DATA_INVALID, reason, "return one finite number for each answer")
        by_name = grader.values if isinstance(grader, CombinedGrader) else {grader.name: rewards}
        for name, values in by_name.items():
            log_metric(f"graders/{name}", sum(values) / len(values))
        return rewards

    reward.__name__ = grader.name
    return reward


def _sample(row: dict[str, Any], completion: Any, state: dict[str, Any] | None) -> Sample:
    """Return the sample of an answer, or of the last answer in a conversation with an environment."""
    columns = {key: value for key, value in row.items() if key != "prompt"}
    if state is not None:
        columns[STATE] = state
        completion = [turn for turn in state["completion"] if turn["role"] == "assistant"]
    text = completion if isinstance(completion, str) else completion[-1]["content"] or ""
    return Sample(row["prompt"], text, columns)


def _prompts(rows: Sequence[dict[str, Any]], start: int) -> Any:
    """Create the dataset that TRL samples from: row numbers, and the column ``prompt``, which TRL requires.

    The prompts themselves are in ``Rollouts.prompts``, because Arrow requires one type per column.
    """
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [""] * len(rows), "row": list(range(start, start + len(rows)))})
