"""Model breadcrumbs: drop the smallest changes and the outliers.

Davari & Belilovsky 2023, "Model Breadcrumbs: Scaling Multi-Task Model Merging with Sparse Masks", sec. 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from gym_fed.core.lazy import torch
from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import combination, largest, whole_share

if TYPE_CHECKING:
    from torch import Tensor


class BreadcrumbsConfig(MethodConfig):
    smallest: Annotated[float, Field(ge=0, lt=1)] = 0.85
    """Share of each tensor's smallest elements to drop, the paper's beta; rounded down to whole elements."""

    largest: Annotated[float, Field(ge=0, lt=1)] = 0.007
    """Share of each tensor's largest elements to drop, the paper's 1 - gamma; rounded down."""

    @model_validator(mode="after")
    def _something_left(self) -> BreadcrumbsConfig:
        if self.smallest + self.largest >= 1:
            raise ValueError(f"smallest {self.smallest} and largest {self.largest} leave nothing")
        return self


class Breadcrumbs(MergeMethod):
    """``scale * sum_i w_i m_i delta_i``, where mask ``m_i`` keeps the middle magnitudes of a tensor.

    ``scale`` is the paper's alpha, 0.3 in its experiments. Weights are not normalised, as in ``task_arithmetic``.
    mergekit has a density instead of the lower share, and drops fewer outliers if density and upper share conflict.
    """

    name = "breadcrumbs"
    Config = BreadcrumbsConfig
    config: BreadcrumbsConfig

    def _merge(self, task: TensorTask) -> Tensor:
        return combination([self._middle(delta) for delta in task.deltas], task.weights)

    def _middle(self, delta: Tensor) -> Tensor:
        size = delta.numel()
        outliers = largest(delta, whole_share(self.config.largest, size))
        above = largest(delta, size - whole_share(self.config.smallest, size))
        return torch.where(above & ~outliers, delta, 0.0)
