"""Pipeline parallelism: each process holds consecutive blocks of the model (Huang et al. 2019, "GPipe").

``torch.distributed.pipelining`` schedules the micro-batches, which are the ``gradient_accumulation_steps`` of a step,
and sends hidden states and their gradients between stages. All processes have the same rows, so masks and labels are
not sent. Stages are numbered from the last process: process 0 has the last blocks, the head and the loss, and writes
the logs.

A trainer's ``compute_loss`` needs no changes. It is called twice for each micro-batch. The first call, in every
process, ends when it calls the decoder, whose arguments are passed to the stage. The second call is in the last stage,
where the decoder returns the hidden states that have passed through the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.processes.group import world_size
from gym_fed.training.processes.sharding import settings_of
from gym_fed.training.processes.stages import ModelStages


class _DecoderCalled(Exception):
    """Raised when a loss calls the decoder, to end the loss; contains the arguments of the call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the decoder was called")
        self.arguments = arguments


class _Runner(nn.Module):
    """The module that torch's stage calls with the index of a micro-batch and the previous stage's hidden states."""

    def __init__(self, run: Callable[[int, torch.Tensor | None], torch.Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self._run(int(index), hidden[0] if hidden else None)


class ModelPipeline:
    """Runs the micro-batches of a step, or single batches, through the stages.

    Args:
        stages: The stages of the model; only this process's stage is kept.
        schedule: ``1f1b`` or ``gpipe``.
    """

    def __init__(self, stages: ModelStages, schedule: str) -> None:
        self.stages = stages
        self.schedule_name = schedule
        self._arguments: list[dict[str, Any]] = []
        self._shape: tuple[int, ...] = ()
        self._loss_of: Callable[[int], torch.Tensor] | None = None
        self._captures = False
        self._hidden: torch.Tensor | None = None
        self._schedule: tuple[Any, Any] = (None, None)
        stages.cut()
        stages.decoder.forward = self._called
        stages.base.pipeline = self

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.stages.device

    def step(self, count: int, loss_of: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Run the forward and backward passes of a step's micro-batches.

        Args:
            count: Number of micro-batches.
            loss_of: Maps the index of a micro-batch to its loss; must call the model once.

        Returns:
            The sum of the losses, in every process.
        """
        self._arguments = [self._captured(partial(loss_of, index)) for index in range(count)]
        self._loss_of = loss_of
        index = torch.arange(count, device=self.device)
        losses: list[torch.Tensor] = []
        schedule = self._scheduled(count)
        target = {"target": index, "losses": losses} if self.stages.is_last else {}
        schedule.step(index=index, return_outputs=False, **target)
        self._arguments = []
        self.stages.add_tied_gradients()
        if not self.stages.is_last:
            return self.broadcast(torch.zeros((), device=self.device))
        return self.broadcast(torch.stack(losses).sum().detach().float())

    def infer(self, run: Callable[[], Any]) -> Any:
        """Return the value of ``run``, which must call the model once, in the last stage; return None in the others."""
        arguments = self._captured(run)
        shape = (*arguments["input_ids"].shape, self.stages.base.config.hidden_size)
        with torch.no_grad():
            hidden = None
            if not self.stages.is_first:
                hidden = torch.empty(shape, dtype=self.stages.base.dtype, device=self.device)
                dist.recv(hidden, self.stages.rank + 1)
            out = self.stages.forward(arguments, hidden)
            if not self.stages.is_last:
                dist.send(out.contiguous(), self.stages.rank - 1)
                return None
            self._hidden = out
            try:
                return run()
            finally:
                self._hidden = None

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the main process's tensor in every process; the others pass a tensor of the same shape."""
        values = values.contiguous()
        dist.broadcast(values, 0)
        return values

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the decoder's forward method."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        if args:
            args, kwargs = args[1:], {"input_ids": args[0], **kwargs}
        if self._captures and not args and kwargs.get("input_ids") is not None:
            raise _DecoderCalled(kwargs)
        if self._hidden is None:
            raise GymError(ErrorCode.INTERNAL, "a part of the model was called outside the pipeline")
        return BaseModelOutputWithPast(last_hidden_state=self._hidden)

    def _captured(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Return the arguments that ``run`` passes to the decoder; ``run`` is aborted at that call."""
        self._captures = True
        try:
            run()
        except _DecoderCalled as called:
            return called.arguments
        finally:
            self._captures = False
        raise GymError(ErrorCode.INTERNAL, "a loss did not call the model")

    def _scheduled(self, count: int) -> Any:
        """Return the schedule for the shapes of a step. Micro-batches are padded to the size of the largest one."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        shapes = [arguments["input_ids"].shape for arguments in self._arguments]
        self._shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        key = (count, *self._shape)
        if self._schedule[0] == key:
            return self._schedule[1]
        size = (*self._shape, self.stages.base.config.hidden_size)
        hidden = torch.empty(size, dtype=self.stages.base.dtype, device=self.device, requires_grad=True)
        # If the shapes are given, torch does not send pickled descriptions of them.
        index, number = self.stages.stage, self.stages.size
        inputs = () if self.stages.is_first else (hidden,)
        stage = PipelineStage(
            _Runner(self._run), index, number, self.device, input_args=inputs, output_args=(hidden,)
        )
        stage.stage_index_to_group_rank = {i: number - 1 - i for i in range(number)}
        one_f_one_b = self.schedule_name == "1f1b" and count >= number
        kind = Schedule1F1B if one_f_one_b else ScheduleGPipe
        schedule = kind(stage, n_microbatches=count, loss_fn=self._loss, scale_grads=False)
        self._schedule = (key, schedule)
        return schedule

    def _run(self, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
        arguments = self._arguments[index]
        rows, length = arguments["input_ids"].shape
        out = self.stages.forward(arguments, None if hidden is None else hidden[:rows, :length])
        return nn.functional.pad(out, (0, 0, 0, self._shape[1] - length, 0, self._shape[0] - rows))

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        index = int(target)
        rows, length = self._arguments[index]["input_ids"].shape
        self._hidden = output[:rows, :length]
        try:
            assert self._loss_of is not None  # set by ``step``
            return self._loss_of(index)
        finally:
            self._hidden = None


def pipeline_of(model: Any) -> ModelPipeline | None:
    """Return the pipeline of a model that was cut into stages; None for a whole model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "pipeline", None)


def cut_into_stages(model: Any, config: TrainingConfig, device: Any) -> Any:
    """Return this process's stage of a model, on its device; under other strategies, return the model unchanged.

    Raises:
        GymError: ``MODEL_INVALID`` if the model cannot be cut.
    """
    if world_size() == 1 or settings_of(config).strategy != "pipeline_parallel":
        return model
    ModelPipeline(ModelStages(model, config), settings_of(config).pipeline_schedule or "1f1b")
    return model.to(device)
