"""Supervised fine-tuning on threads: the assistant's turns are learned. `gym train` calls it ``sft``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gym_fed.training.loops.base import Loop, answered
from gym_fed.training.loops.string_thread import StringThread

if TYPE_CHECKING:
    from gym_fed.base.models import LoadedModel


class SFT(Loop):
    """``SFT(dataset, model, context=context).run()``; the threads end with the assistant."""

    algorithm = "sft"

    def __init__(
        self,
        dataset: Sequence[StringThread],
        model: LoadedModel,
        *,
        lr: float = 1e-5,
        samples_per_batch: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(dataset, model, lr=lr, samples_per_batch=samples_per_batch, **options)

    def rows(self) -> list[dict[str, Any]]:
        return [{"messages": thread.messages()} for thread in answered(self.dataset)]
