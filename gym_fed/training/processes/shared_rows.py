"""Give groups of processes the same rows, in accelerate's dataloaders and gathered metrics."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import init_device_mesh

from gym_fed.training.processes.ranks import world_size

_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer


class AnyDeviceParallelism(ParallelismConfig):  # type: ignore[misc]  # untyped
    """A parallelism config that lets processes share rows on a CPU; accelerate's own check allows only GPUs."""

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Accept every accelerator, since the processes have already joined."""


def local_values(values: Any) -> Any:
    """Return the values as accelerate gathers them from a single process."""
    return recursively_apply(torch.atleast_1d, values)


class SharedRows(AnyDeviceParallelism):
    """Makes accelerate give the same rows to groups of consecutive processes under DDP.

    The dimension of a group is named ``cp``, which accelerate's dataloaders read. accelerate's own context parallelism,
    which fails on CPUs, stays off, since ``cp_size`` is 1.

    Args:
        size: Number of processes in a group.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.group_size = size

    def build_device_mesh(self, device_type: str) -> Any:
        """Return a device mesh ``[groups, processes of a group]``."""
        shape = (world_size() // self.group_size, self.group_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "cp"))


class RowsOfGroups(_Trainer):  # type: ignore[misc]
    """A mix-in for trainers in which groups of processes have the same rows; it has no effect on other trainers.

    Metrics are gathered from the first process of each group. Sums over all processes, such as the number of labels in
    a step, still count every process, because losses are multiplied by the number of processes.
    """

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        rows = self.args.parallelism_config
        if not isinstance(rows, SharedRows):
            return
        accelerator, size = self.accelerator, rows.group_size
        gather, gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics
        all_alike = size == accelerator.num_processes

        def first_of_group(gathered: torch.Tensor) -> torch.Tensor:
            own = len(gathered) // accelerator.num_processes
            return gathered.view(-1, size, own, *gathered.shape[1:])[:, 0].flatten(0, 1)

        def of_first(values: Any) -> Any:
            return recursively_apply(first_of_group, gather(values))

        def of_groups(*args: Any, **named: Any) -> Any:
            before, accelerator.gather = accelerator.gather, local_values if all_alike else of_first
            try:
                return gather_for_metrics(*args, **named)
            finally:
                accelerator.gather = before

        accelerator.gather_for_metrics = self.gather_function = of_groups
