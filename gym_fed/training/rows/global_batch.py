"""Make losses means over all items of an optimiser step, across all processes.

A mean of means over batches of different sizes is not the mean over their rows or tokens. The mean of each batch is
therefore weighted by its share of the step's items: ``share = n_batch * processes / n_step``. The factor ``processes``
undoes the averaging of gradients over the processes. The sum over a step is then the mean over its items, regardless of
the number of batches and processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer


class GlobalBatch(_Trainer):  # type: ignore[misc]
    """A mix-in to be placed before a ``transformers.Trainer`` whose loss is a mean over a batch.

    A subclass counts the items of a batch (``items``) and weights the parts of its loss with ``share``, which is 1 in
    evaluation.
    """

    loss_is_scaled_for_ga = True
    """Prevents transformers from dividing by the number of batches."""

    _step_items: dict[str, float] | None = None
    _waiting: tuple[Any, ...] = ()

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the number of items of each kind (rows, tokens) in the batch, as integers or one-element tensors."""
        raise NotImplementedError

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return the step's batches, which ``training_step`` counts after a resume has set the random states."""
        batches, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._waiting = tuple(batches)
        return batches, number

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run the trainer's step. A batch outside the loop (``auto_batch_size``) counts as a separate step."""
        waiting, self._waiting = self._waiting, ()
        if waiting or self._step_items is None:
            self.count(list(waiting) or [inputs])
        return super().training_step(model, inputs, num_items_in_batch)

    def count(self, batches: list[Any]) -> None:
        """Count the items in a step's batches, at least one batch, across all processes."""
        import torch

        counts = [self.items(batch) for batch in batches]
        names = list(counts[0])
        sums = [sum(int(batch_counts[name]) for batch_counts in counts) for name in names]
        total = self.accelerator.reduce(torch.tensor(sums, device=self.args.device), reduction="sum")
        self._step_items = dict(zip(names, map(float, total.tolist()), strict=True))

    def share(self, name: str, number: Any) -> Any:
        """Return the weight of a batch's mean over ``number`` items of the kind ``name``."""
        if self._step_items is None or not self.model.training:
            return 1.0
        return number * self.accelerator.num_processes / max(self._step_items[name], 1.0)


class RowMeans(GlobalBatch):
    """A mix-in for trainers whose loss is a mean over rows or pairs."""

    def rows(self, batch: dict[str, Any]) -> int:
        """Return the number of rows in a batch; by default pairs, all chosen answers before all rejected ones."""
        return len(batch["input_ids"]) // 2

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"rows": self.rows(batch)}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the trainer's loss, weighted."""
        weight = self.share("rows", self.rows(inputs))
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (loss[0] * weight, loss[1]) if return_outputs else loss * weight
