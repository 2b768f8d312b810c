"""Direct preference optimisation on pairs of threads; Rafailov et al. 2023. `gym train` calls it ``dpo``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.loops.base import Loop, answered
from gym_fed.training.loops.string_thread import StringThread

if TYPE_CHECKING:
    from gym_fed.base.models import LoadedModel


class DPO(Loop):
    """``DPO(pairs, model, beta=0.1).run()``; a pair is the preferred thread and the other, with one prompt."""

    algorithm = "dpo"

    def __init__(
        self,
        dataset: Sequence[tuple[StringThread, StringThread]],
        model: LoadedModel,
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
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"pair {number}: the two threads do not begin alike",
                    "give two answers to one prompt",
                )
            prompt, *answers = chosen.prompt().messages(), chosen.messages()[-1:], rejected.messages()[-1:]
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        return rows
