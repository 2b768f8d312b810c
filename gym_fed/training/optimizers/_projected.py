"""The common part of GaLore and APOLLO: gradients of linear layers, and so the state, are projected to a low rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.training.optimizers._made import (
    MadeOptimizer,
    hidden_matrices,
    imported,
    refuse_adapters,
    split,
)
from gym_fed.training.optimizers.base import TrainedWeight, factored_bytes, refuse_loraplus

# The values that the libraries distinguish; anything else fails in the middle of a step, or moves nothing.
_CHOICES = {
    "proj_type": ("std", "reverse_std", "right", "left"),
    "proj": ("random", "svd"),
    "scale_type": ("channel", "tensor"),
}


def _require_value(config: TrainingConfig, name: str, value: Any) -> None:
    """Refuse an argument of the projection with a wrong type or value."""
    if name in _CHOICES:
        fits, expected = value in _CHOICES[name], f"one of {', '.join(_CHOICES[name])}"
    elif name == "scale":
        fits, expected = isinstance(value, int | float) and value > 0, "a number above 0"
    else:
        fits, expected = isinstance(value, int) and value >= 1, "a whole number of at least 1"
    reason = f"optimizer_args: {config.optimizer} refuses {name} {value!r}"
    refuse_first((not fits or isinstance(value, bool), reason, f"give {expected}"))


@dataclass(frozen=True)
class ProjectedOptimizer(MadeOptimizer):
    """An optimiser with a group of projected weights.

    Attributes:
        projection: Arguments of that group, with defaults; users may set them.
        projectors: ``module:Class`` of the projectors that the state holds.
        factored: Whether its second moments are a row and a column of each matrix.
    """

    projection: Mapping[str, Any] = field(default_factory=dict)
    projectors: tuple[str, ...] = ()
    factored: bool = False
    whole_weights: bool = True

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        """Return the state's bytes: for a projected ``[m, n]`` that of ``[rank, max(m, n)]``, and the projection."""
        if not weight.hidden:
            return self._moments(weight, config)
        wide, narrow = max(weight.shape), min(weight.shape)
        rank = int(config.optimizer_args.get("rank", self.projection["rank"]))
        if self.projection.get("proj") != "random":  # there are no more singular vectors than that
            rank = min(rank, narrow)
        state = self._moments(TrainedWeight((rank, wide), weight.itemsize), config)
        return state + rank * narrow * weight.itemsize

    def _moments(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return factored_bytes(weight) if self.factored else super().state_bytes(weight, config)

    def check(self, config: TrainingConfig) -> None:
        refuse_adapters(config, "projects the gradients of whole weights")
        refuse_loraplus(config)
        super().check(config)
        for name, default in self.projection.items():
            _require_value(config, name, config.optimizer_args.get(name, default))

    def known(self) -> list[str]:
        unread = {"no_deprecation_warning", "correct_bias"}
        return [*self.projection, *(name for name in super().known() if name not in unread)]

    def make(self, model: Any, config: TrainingConfig) -> Any:
        hidden = hidden_matrices(model)
        groups: dict[tuple[bool, float], list[Any]] = {}
        for _, value, decay in split(model, config):
            groups.setdefault((id(value) in hidden, decay), []).append(value)
        return self.construct(
            [
                {"params": values, "weight_decay": decay, **(self._group(config) if projected else {})}
                for (projected, decay), values in groups.items()
            ],
            config,
        )

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        rest = {name: value for name, value in config.optimizer_args.items() if name not in self.projection}
        for group in groups:
            group.setdefault("weight_decay", config.weight_decay)
        return super().construct(groups, config.model_copy(update={"optimizer_args": rest}))

    def type(self) -> Any:
        return _resumable(imported(self.source), self.projectors)

    def _group(self, config: TrainingConfig) -> dict[str, Any]:
        return {name: config.optimizer_args.get(name, value) for name, value in self.projection.items()}


@cache
def _resumable(optimizer: Any, projectors: tuple[str, ...]) -> Any:
    """Return a subclass whose state holds only tensors and numbers.

    The libraries keep projector objects in it, and a checkpoint with objects is not loaded (``weights_only``).
    """
    kinds = {source: imported(source) for source in projectors}

    class Resumable(optimizer):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            saved: dict[str, Any] = super().state_dict()
            saved["state"] = {key: {**state} for key, state in saved["state"].items()}
            saved["projectors"] = {}
            for key, state in saved["state"].items():
                if "projector" in state:
                    projector = state.pop("projector")
                    source = next(source for source, kind in kinds.items() if type(projector) is kind)
                    saved["projectors"][key] = {"source": source, "fields": {**vars(projector)}}
            return saved

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            inner = {key: value for key, value in state_dict.items() if key != "projectors"}
            super().load_state_dict(inner)
            weights = [value for group in self.param_groups for value in group["params"]]
            for key, plain in state_dict["projectors"].items():
                kind = kinds[plain["source"]]
                projector = kind.__new__(kind)
                vars(projector).update(_moved(plain["fields"], weights[key].device))
                self.state[weights[key]]["projector"] = projector

    Resumable.__name__ = optimizer.__name__
    return Resumable


def _moved(fields: dict[str, Any], device: Any) -> dict[str, Any]:
    """Move tensors of a projector, alone or in a list, to the device of its weight."""

    def on_device(value: Any) -> Any:
        if isinstance(value, list):
            return [on_device(each) for each in value]
        return value.to(device) if hasattr(value, "to") else value

    return {name: on_device(value) for name, value in fields.items()}
