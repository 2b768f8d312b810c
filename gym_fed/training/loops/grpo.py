"""Group relative policy optimisation on threads; Shao et al. 2024. `gym train` calls it ``grpo``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gym_fed.evaluation.graders.base import Grader
from gym_fed.training.loops.base import Graded, ThreadGrader
from gym_fed.training.loops.string_thread import StringThread

if TYPE_CHECKING:
    from gym_fed.base.models import LoadedModel


class GRPO(Graded):
    """``GRPO(threads, policy, grader, completions_per_sample=8).run()``.

    A batch is ``samples_per_batch`` prompts with ``completions_per_sample`` answers each. Each mini-batch of
    ``samples_per_mini_batch`` prompts is one step of the optimiser.
    """

    algorithm = "grpo"

    def __init__(
        self,
        dataset: Sequence[StringThread],
        policy_model: LoadedModel,
        grader: Grader | ThreadGrader | Sequence[Grader | ThreadGrader],
        *,
        lr: float = 1e-6,
        kl_beta: float = 0.0,
        samples_per_batch: int = 32,
        completions_per_sample: int = 8,
        max_completion_length: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(
            dataset,
            policy_model,
            grader,
            lr=lr,
            kl_beta=kl_beta,
            samples_per_batch=samples_per_batch,
            **options,
        )
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
