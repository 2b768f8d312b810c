"""Batches of rows of similar length, in an order that a resumed run repeats."""

from __future__ import annotations

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class EpochLengthGroups(LengthGroupedSampler):
    """transformers' order of ``group_by_length``, drawn from seed and epoch.

    Its own is drawn from the process's random state as that is when an epoch begins, which a run resumed within a later
    epoch does not have.
    """

    def __init__(self, of: LengthGroupedSampler, seed: int) -> None:
        super().__init__(of.batch_size, lengths=of.lengths, generator=torch.Generator().manual_seed(seed))
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate's dataloader calls it before each one."""
        self.generator.manual_seed(self._seed + epoch)
