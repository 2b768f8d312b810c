"""Train a model that is a stage of a pipeline: steps, evaluation, clipping and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gym_fed.training.processes.group import is_main
from gym_fed.training.processes.pipeline import ModelPipeline, pipeline_of
from gym_fed.training.processes.shared_rows import local_values

_SCHEDULER = "scheduler.pt"
_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer


class Pipelined(_Trainer):  # type: ignore[misc]
    """A mix-in for TRL trainers whose model is a stage of a pipeline; it has no effect on other models.

    The micro-batches of a step are collected, and run when the last one arrives.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any

    _collects = False
    _weight: Any = None

    def __init__(self, *args: Any, **named: Any) -> None:
        self._collected: list[tuple[dict[str, Any], Any, Any]] = []
        model = named.get("model")
        self._pipeline: ModelPipeline | None = None if model is None else pipeline_of(model)
        super().__init__(*args, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._pipeline is not None:
            self.accelerator.prepare_model = lambda model, **named: model  # no DDP around a stage

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self._pipeline is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._collects = True
        try:
            super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._collects = False
        # The gradient of the placeholder is the factor by which the trainer scales the loss.
        collected, number = self._collected[-1][:2]
        self._collected[-1] = (collected, number, self._weight.grad)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self._pipeline.device)
        batches, self._collected = self._collected, []
        loss_of = super().compute_loss

        def weighted(index: int) -> torch.Tensor:
            batch, number, weight = batches[index]
            with self._alone():
                loss: torch.Tensor = loss_of(model, dict(batch), num_items_in_batch=number) * weight
            return loss

        with self.compute_loss_context_manager():
            return self._pipeline.step(len(batches), weighted)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not self._collects:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert self._pipeline is not None  # only steps of a pipeline collect micro-batches
        self._weight = torch.ones((), device=self._pipeline.device, requires_grad=True)
        self._collected.append((dict(inputs), num_items_in_batch, None))
        return self._weight

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        if self._pipeline is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        inputs, predict = self._prepare_inputs(inputs), super().prediction_step
        with self._alone():
            outputs = self._pipeline.infer(lambda: predict(model, dict(inputs), True, ignore_keys))
        loss = (
            torch.zeros((), device=self._pipeline.device) if outputs is None else outputs[0].detach().float()
        )
        return self._pipeline.broadcast(loss), None, None

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """Return the reference's log-probabilities of a batch's pairs, two tensors ``[n]``, in every process."""
        if self._pipeline is None:
            return super().compute_ref_log_probs(model, inputs)
        compute = super().compute_ref_log_probs
        log_probs = self._pipeline.infer(lambda: compute(model, dict(inputs)))
        if log_probs is None:
            pairs = torch.zeros(2, len(inputs["input_ids"]) // 2, device=self._pipeline.device)
        else:
            pairs = torch.stack([value.float() for value in log_probs])
        return tuple(self._pipeline.broadcast(pairs))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Make a loss gather metrics only from the last stage, which is the only one that computes them."""
        before, self.accelerator.gather = self.accelerator.gather, local_values
        try:
            yield
        finally:
            self.accelerator.gather = before

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._pipeline is None:
            return super()._clip_grad_norm(model)
        norm = self._pipeline.stages.gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self._pipeline is not None and grad_norm is None:
            grad_norm = self._pipeline.stages.gradient_norm()
        return super()._get_grad_norm(model, grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model from the main process; every process must call this."""
        if self._pipeline is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        self.write_weights(folder, lambda weights: self._save(str(folder), state_dict=weights))

    def write_weights(self, folder: Path, write: Callable[[dict[str, torch.Tensor] | None], Any]) -> None:
        """Gather the weights of all stages and write them from the main process.

        Args:
            folder: The folder that ``write`` writes to.
            write: Called with the weights of a model. For an adapter, called with None, and the adapter's file is then
                replaced.
        """
        assert self._pipeline is not None  # checked by the callers
        stages = self._pipeline.stages
        weights = stages.whole_weights()
        if not is_main():
            return
        write(None if stages.is_adapter else weights)
        if stages.is_adapter:  # PEFT saves no weights of modules that this process lacks
            save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._pipeline is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._pipeline.stages.load(Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._pipeline is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.optimizer.state_dict(), folder / self._pipeline.stages.optimizer_file)
        if is_main():
            torch.save(self.lr_scheduler.state_dict(), folder / _SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._pipeline is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, device = Path(checkpoint), self._pipeline.device
        file = folder / self._pipeline.stages.optimizer_file
        self.optimizer.load_state_dict(torch.load(file, weights_only=True, map_location=device))
        self.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))
