"""Define the loops of recipes, one class per algorithm of `gym train`: `SFT`, `DPO`, `GRPO` and `PPO`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader
from gym_fed.training.loops.base import Graded, Loop, StringThread, ThreadGrader, answered

if TYPE_CHECKING:
    from gym_fed.base.models import LoadedModel
    from gym_fed.training.run.result import TrainResult


class SFT(Loop):
    """SFT on threads that end with an assistant turn: ``SFT(dataset, model, context=context).run()``."""

    algorithm = "sft"

    def __init__(
        self,
        dataset: Sequence[StringThread],
        model: LoadedModel | str | Path,
        *,
        lr: float = 1e-5,
        samples_per_batch: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(dataset, model, lr=lr, samples_per_batch=samples_per_batch, **options)

    def rows(self) -> list[dict[str, Any]]:
        return [{"messages": thread.messages()} for thread in answered(self.dataset)]


class DPO(Loop):
    """DPO on pairs of a preferred and a rejected thread with the same prompt: ``DPO(pairs, model, beta=0.1).run()``."""

    algorithm = "dpo"

    def __init__(
        self,
        dataset: Sequence[tuple[StringThread, StringThread]],
        model: LoadedModel | str | Path,
        *,
        lr: float = 1e-6,
        beta: float = 0.1,
        samples_per_batch: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(dataset, model, lr=lr, samples_per_batch=samples_per_batch, **options)
        self.beta = beta

    def section(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for number, (chosen, rejected) in enumerate(self.dataset, 1):
            answered([chosen, rejected])
            if chosen.prompt().turns != rejected.prompt().turns:
                reason = f"pair {number}: the two threads have different prompts"
                raise GymError(ErrorCode.DATA_INVALID, reason, "use two answers to the same prompt")
            prompt, *answers = chosen.prompt().messages(), chosen.messages()[-1:], rejected.messages()[-1:]
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        return rows


class GRPO(Graded):
    """GRPO on graded answers: ``GRPO(threads, model, grader, completions_per_sample=8).run()``.

    A batch has ``samples_per_batch`` prompts with ``completions_per_sample`` answers each. Each mini-batch of
    ``samples_per_mini_batch`` prompts is one optimiser step.
    """

    algorithm = "grpo"

    def __init__(
        self,
        dataset: Sequence[StringThread],
        model: LoadedModel | str | Path,
        grader: Grader | ThreadGrader | Sequence[Grader | ThreadGrader],
        *,
        lr: float = 1e-6,
        kl_beta: float = 0.0,
        samples_per_batch: int = 32,
        completions_per_sample: int = 8,
        max_completion_length: int = 64,
        **options: Any,
    ) -> None:
        options |= {"lr": lr, "samples_per_batch": samples_per_batch}
        super().__init__(dataset, model, grader, kl_beta=kl_beta, **options)
        self.completions_per_sample = completions_per_sample
        self.max_completion_length = max_completion_length
        self._values["per_device_train_batch_size"] = self._mini * completions_per_sample
        self._values["gradient_accumulation_steps"] = 1

    def section(self) -> dict[str, Any]:
        return {
            "num_generations": self.completions_per_sample,
            "max_completion_length": self.max_completion_length,
            "steps_per_generation": self._parts,
            "beta": self.kl_beta,
        }


class PPO(Graded):
    """PPO on graded answers: ``PPO(threads, policy, value, grader, max_num_ppo_steps=100).run()``.

    A PPO step generates an answer to each of ``samples_per_batch`` threads and trains on them ``num_iterations`` times,
    in mini-batches of ``samples_per_mini_batch``. Each mini-batch is one optimiser step.

    Args:
        value_model: The critic to train, from ``RecipeContext.spawn("value", ...)``; None for a copy of the policy's
            body.
        lr_policy: Learning rate of the policy.
        lr_value: Learning rate of the critic; by default the policy's.
        max_num_ppo_steps: Number of PPO steps; by default as many as ``epochs`` takes.
        max_completion_length: Maximum number of tokens of an answer.
        options: Options of ``Loop``.

    See ``Graded`` for the other arguments.
    """

    algorithm = "ppo"

    def __init__(
        self,
        dataset: Sequence[StringThread],
        policy_model: LoadedModel | str | Path,
        value_model: LoadedModel | None,
        grader: Grader | ThreadGrader | Sequence[Grader | ThreadGrader],
        *,
        lr_policy: float = 1e-6,
        lr_value: float | None = None,
        kl_beta: float = 0.01,
        samples_per_batch: int = 32,
        max_num_ppo_steps: int | None = None,
        num_iterations: int = 4,
        max_completion_length: int = 64,
        **options: Any,
    ) -> None:
        for key, own_key in (("max_steps", "max_num_ppo_steps"), ("lr", "lr_policy")):
            if key in options:
                raise GymError(ErrorCode.USAGE, f"PPO: {key}", f"set {own_key}")
        options |= {"lr": lr_policy, "samples_per_batch": samples_per_batch}
        super().__init__(dataset, policy_model, grader, kl_beta=kl_beta, **options)
        self.value_model = value_model
        self.lr_value = lr_value
        self.num_iterations = num_iterations
        self.max_completion_length = max_completion_length
        self._values["gradient_accumulation_steps"] = 1
        if max_num_ppo_steps is not None:
            self._values["max_steps"] = max_num_ppo_steps * self._parts * num_iterations

    def section(self) -> dict[str, Any]:
        section: dict[str, Any] = {
            "max_completion_length": self.max_completion_length,
            "steps_per_generation": self._parts,
            "num_iterations": self.num_iterations,
            "beta": self.kl_beta,
            "critic_learning_rate": self.lr_value,
        }
        return section if self.value_model is None else {**section, "critic": str(self._critic_folder)}

    @property
    def _critic_folder(self) -> Any:
        return self.output_dir.parent / f"{self.output_dir.name}-critic-at-start"

    def run(self) -> TrainResult:
        """Train the policy and the value model in place; see ``Loop.run``."""
        if self.value_model is None:
            return super().run()
        from gym_fed.training.model.critic import Critic, load_critic

        critic = self.value_model.model
        if not isinstance(critic, Critic):
            reason = "PPO: value_model is not a critic"
            raise GymError(ErrorCode.USAGE, reason, 'spawn it: context.spawn("value", model=...)')
        if not self._critic_folder.exists():  # a resumed loop uses the existing critic
            self._critic_folder.mkdir(parents=True)
            critic.save_pretrained(self._critic_folder)
        result = super().run()
        folder = str(result.output_dir / "critic")
        trained = load_critic(folder, self.model.model, dtype=self.config().dtype, train_body=True)
        critic.load_state_dict(trained.state_dict())
        return result
