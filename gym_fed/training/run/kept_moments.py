"""Continue AdamW from the moments of an earlier run, and save the moments of this one, like DiLoCo's workers.

Douillard et al. 2023, "DiLoCo" (arXiv:2311.08105), sec. 2: the inner optimiser's state stays with the worker between
rounds. The file has the format of residuals, with ``step``, ``exp_avg/NAME`` and ``exp_avg_sq/NAME`` in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.training.audits.observer import StepObserver
from gym_fed.training.audits.states import MOMENTS

BYTES_PER_WEIGHT = 8
"""Bytes of the two float32 moments of a weight."""

_STEP = "step"


class KeptMoments(StepObserver):
    """Loads moments into a run's optimiser before the first step, and saves them after the last. Batches are ignored.

    The run must save checkpoints. The file is written before the last checkpoint is complete, so it also exists if a
    run resumes from that checkpoint and takes no more steps.

    Args:
        start: Returns the moments to start from, by name; empty for none. They are not kept in memory during training.
        path: The file to write.
        lineage: Digest of the base from which the federation started.
    """

    def __init__(self, start: Callable[[], Mapping[str, Tensor]], path: Path, lineage: str) -> None:
        super().__init__()
        self._start, self._path, self._lineage = start, path, lineage

    def attach(self, trainer: Any) -> None:
        """Observe a transformers trainer only to save its moments; its steps are unchanged."""
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the moments; a resumed run has them in its checkpoint instead."""
        if state.global_step or not (start := self._start()):
            return
        for name, parameter in _trained(kwargs["model"]):
            moments = {}
            for moment in MOMENTS:
                stored = start.get(f"{moment}/{name}", torch.zeros_like(parameter))
                if stored.shape != parameter.shape:
                    raise GymError(
                        ErrorCode.STATE_CORRUPT,
                        f"the saved moment {moment} of {name!r} has shape {list(stored.shape)}, but the "
                        f"weight has {list(parameter.shape)}",
                        "delete residuals/moments.safetensors in the client's home to start from zero",
                    )
                moments[moment] = stored.to(parameter, copy=True)
            step = start[_STEP][0].to(parameter.device, copy=True)
            _state_of(kwargs["optimizer"])[parameter] = {_STEP: step, **moments}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the moments of the last step durably."""
        if state.global_step < state.max_steps:
            return
        file, states = ErrorFeedback(self._path, self._lineage, {}), _state_of(kwargs["optimizer"])
        for name, parameter in _trained(kwargs["model"]):
            if parameter in states:
                file.record(_STEP, torch.as_tensor(states[parameter][_STEP]).reshape(1))
                for moment in MOMENTS:
                    file.record(f"{moment}/{name}", states[parameter][moment])
        file.stage(self._path)


def _trained(model: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _state_of(optimizer: Any) -> Any:
    """Return the per-parameter state of an optimiser, which accelerate may have wrapped."""
    return getattr(optimizer, "optimizer", optimizer).state
