"""The section ``privacy`` of `gym train`: DP-SGD, with its noise given or computed from a target epsilon."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gym_fed.config.hub.privacy import LocalPrivacy, TargetDelta
from gym_fed.config.schema.base import StrictModel


class TrainingPrivacy(StrictModel):
    """DP-SGD (Abadi et al. 2016, arXiv:1607.00133): example-level, batches are Poisson samples.

    Adjacency: two data sets are neighbours when one holds one example more. An example is a row of the data.
    """

    noise_multiplier: Annotated[float, Field(gt=0)] | None = None
    """Standard deviation of a step's noise over ``max_grad_norm``."""

    target_epsilon: Annotated[float, Field(gt=0)] | None = None
    """Instead of ``noise_multiplier``: the epsilon of the whole run; the least noise for it is computed."""

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """L2 norm to which the gradient of every example is clipped."""

    target_delta: TargetDelta = 1e-5
    grad_sample_mode: Literal["hooks", "functorch", "ghost"] = "hooks"
    """How gradients of single examples are computed; ``ghost`` needs only their norms, and less memory."""

    @model_validator(mode="after")
    def _validate_noise(self) -> TrainingPrivacy:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError("give either noise_multiplier or target_epsilon")
        return self

    @classmethod
    def of(cls, local: LocalPrivacy) -> TrainingPrivacy:
        """The settings of a round's recipe."""
        return cls(**local.model_dump())


class PrivacySections(StrictModel):
    """Keys of the YAML's top level."""

    privacy: TrainingPrivacy | None = None
    """Train with differential privacy, by an algorithm whose loss is a mean over examples (``sft``, ``pretrain``).
    See the guide to private training."""
