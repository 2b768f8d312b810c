"""List the optimisers that only need a class name and settings, including GaLore and APOLLO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.training.optimizers.base import (
    LibraryOptimizer,
    TrainedWeight,
    factored_bytes,
    hidden_groups,
    import_class,
    refuse_adapters,
    refuse_loraplus,
)

_BNB = "bitsandbytes.optim"

_LION_RATE = 0.3
"""Chen et al. 2023, section 5: a rate 3 to 10 times smaller than AdamW's, since all updates have the same size."""

_PAGED = "its state moves between GPU and main memory"

# Other values would fail in the middle of a step, or have no effect.
_CHOICES = {
    "proj_type": ("std", "reverse_std", "right", "left"),
    "proj": ("random", "svd"),
    "scale_type": ("channel", "tensor"),
}


class Factored(LibraryOptimizer):
    """An optimiser that stores second moments per row and column of a matrix; Shazeer and Stern 2018, algorithm 4."""

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return factored_bytes(weight)


class Soap(LibraryOptimizer):
    """An optimiser with Adam's moments, and a preconditioner and eigenvectors for each side of a matrix.

    Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam".
    """

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        largest = int(config.optimizer_args.get("max_precondition_dim", 10000))
        sides = weight.shape if len(weight.shape) > 1 else ()
        squares = sum(2 * side * side for side in sides if side <= largest)
        return float(weight.itemsize * (2 * weight.numel + squares))


@dataclass(frozen=True)
class ScheduleFree(LibraryOptimizer):
    """An optimiser that averages the iterates instead of lowering the learning rate (Defazio et al. 2024).

    Gradients are computed at y, but the result is x, so the weights must be swapped before the model is used.
    transformers swaps them for evaluation, and the callback swaps them at the end.

    Attributes:
        warms_up: True if it accepts ``warmup_steps``.
    """

    replaces_schedule = True
    package: str | None = "schedulefree"
    warms_up: bool = True

    def check(self, config: TrainingConfig) -> None:
        key = "warmup_ratio" if config.warmup_ratio else "warmup_steps"
        other = config.lr_scheduler_type
        schedule = (
            f"lr_scheduler_type: {other} cannot be used with {config.optimizer}, which replaces the schedule"
        )
        unused = config.warmup_ratio or (config.warmup_steps and not self.warms_up)
        remedy = "set warmup_steps" if self.warms_up else "remove it: this optimizer has its own warm-up"
        refuse_first(
            (
                other != "constant",
                schedule,
                f"set it to constant{'; warmup_steps still applies' if self.warms_up else ''}",
            ),
            (unused, f"{key}: optimizer {config.optimizer} cannot use it", remedy),
        )
        super().check(config)

    def known(self) -> list[str]:
        return [name for name in super().known() if name not in ("warmup_steps", "foreach")]

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        if not self.warms_up:
            return super().construct(groups, config)
        warm = {**config.optimizer_args, "warmup_steps": config.warmup_steps}
        return super().construct(groups, config.model_copy(update={"optimizer_args": warm}))

    def callbacks(self, config: TrainingConfig) -> list[Any]:
        from transformers import TrainerCallback

        class AverageAtEnd(TrainerCallback):
            """Replaces the weights with their average after the last step, before the step's checkpoint."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step >= state.max_steps:
                    kwargs["optimizer"].eval()

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                kwargs["optimizer"].eval()  # the run may have ended early; a second call has no effect

        return [AverageAtEnd()]


@dataclass(frozen=True)
class ProjectedOptimizer(LibraryOptimizer):
    """An optimiser that projects the gradients of linear layers, and therefore their state, to a low rank.

    Attributes:
        projection: Arguments of the projected parameter group that users may set, with their defaults.
        projectors: The projector classes in the state, as ``module:Class``.
        factored: True if second moments are stored per row and column of a matrix.
    """

    projection: Mapping[str, Any] = field(default_factory=dict)
    projectors: tuple[str, ...] = ()
    factored: bool = False
    whole_weights: bool = True

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        """Return the bytes of state; for a projected ``[m, n]``, those of ``[rank, max(m, n)]`` and the projection."""
        if not weight.hidden:
            return self._moments(weight, config)
        wide, narrow = max(weight.shape), min(weight.shape)
        rank = int(config.optimizer_args.get("rank", self.projection["rank"]))
        if self.projection.get("proj") != "random":
            rank = min(rank, narrow)  # the number of singular vectors
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
        ignored = {"no_deprecation_warning", "correct_bias"}
        return [*self.projection, *(name for name in super().known() if name not in ignored)]

    def make(self, model: Any, config: TrainingConfig) -> Any:
        arguments = {name: config.optimizer_args.get(name, value) for name, value in self.projection.items()}
        groups = [
            {"params": values, "weight_decay": decay, **(arguments if is_hidden else {})}
            for (is_hidden, decay), values in hidden_groups(model, config).items()
        ]
        return self.construct(groups, config)

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        rest = {name: value for name, value in config.optimizer_args.items() if name not in self.projection}
        for group in groups:
            group.setdefault("weight_decay", config.weight_decay)
        return super().construct(groups, config.model_copy(update={"optimizer_args": rest}))

    def type(self) -> Any:
        return _resumable(import_class(self.source), self.projectors)


def _require_value(config: TrainingConfig, name: str, value: Any) -> None:
    """Refuse a projection argument of the wrong type or with an invalid value."""
    if name in _CHOICES:
        fits, expected = value in _CHOICES[name], f"one of {', '.join(_CHOICES[name])}"
    elif name == "scale":
        fits, expected = isinstance(value, int | float) and value > 0, "a number above 0"
    else:
        fits, expected = isinstance(value, int) and value >= 1, "an integer of at least 1"
    reason = f"optimizer_args: {config.optimizer} does not accept {name} {value!r}"
    refuse_first((not fits or isinstance(value, bool), reason, f"use {expected}"))


@cache
def _resumable(optimizer: Any, projectors: tuple[str, ...]) -> Any:
    """Return a subclass whose state contains only tensors and numbers.

    The libraries store projector objects, which ``torch.load`` with ``weights_only`` refuses.
    """
    kinds = {source: import_class(source) for source in projectors}

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
                vars(projector).update(_to_device(plain["fields"], weights[key].device))
                self.state[weights[key]]["projector"] = projector

    Resumable.__name__ = optimizer.__name__
    return Resumable


def _to_device(fields: dict[str, Any], device: Any) -> dict[str, Any]:
    """Move a projector's tensors, alone or in a list, to the device of its weight."""

    def on_device(value: Any) -> Any:
        if isinstance(value, list):
            return [on_device(each) for each in value]
        return value.to(device) if hasattr(value, "to") else value

    return {name: on_device(value) for name, value in fields.items()}


def _bnb(
    name: str, *, bits: int, values: float = 2.0, gpu: str = "", rate_scale: float = 1.0
) -> LibraryOptimizer:
    return LibraryOptimizer(
        f"{_BNB}:{name}",
        package="bitsandbytes",
        extra="quant",
        gpu=gpu,
        learning_rate_scale=rate_scale,
        fixed={"optim_bits": bits, "is_paged": bool(gpu)},
        state_values=values,
        state_bits=bits,
    )


def _galore(
    name: str,
    *,
    betas: bool = True,
    fixed: Mapping[str, Any] | None = None,
    gpu: str = "",
    factored: bool = False,
) -> ProjectedOptimizer:
    return ProjectedOptimizer(
        f"galore_torch:{name}",
        package="galore_torch",
        betas=betas,
        fixed=fixed or {},
        gpu=gpu,
        projection={"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
        projectors=("galore_torch.galore_projector:GaLoreProjector",),
        factored=factored,
    )


TABLE: dict[str, LibraryOptimizer] = {
    # From torch and transformers.
    "sgd": LibraryOptimizer(
        "torch.optim:SGD",
        betas=False,
        shards=True,
        per_example=True,
        learning_rate_scale=None,
        state_values=0.0,
    ),
    "adagrad": LibraryOptimizer(
        "torch.optim:Adagrad", betas=False, per_example=True, learning_rate_scale=None, state_values=1.0
    ),
    "rmsprop": LibraryOptimizer("torch.optim:RMSprop", betas=False, per_example=True, state_values=1.0),
    "adafactor": Factored(  # Shazeer and Stern 2018, with a given learning rate
        "transformers:Adafactor",
        betas=False,
        fixed={"scale_parameter": False, "relative_step": False},
        per_example=True,
    ),
    # Dettmers et al. 2022: the state is in 8 bits, quantised in blocks; for small tensors it is in 32 bits.
    "adamw_8bit": _bnb("AdamW", bits=8),
    "lion_8bit": _bnb("Lion", bits=8, values=1.0, rate_scale=_LION_RATE),
    "ademamix": _bnb("AdEMAMix", bits=32, values=3.0),  # Pagliardini et al. 2024
    "ademamix_8bit": _bnb("AdEMAMix", bits=8, values=3.0),
    "paged_adamw": _bnb("AdamW", bits=32, gpu=_PAGED),
    "paged_adamw_8bit": _bnb("AdamW", bits=8, gpu=_PAGED),
    "paged_lion": _bnb("Lion", bits=32, values=1.0, gpu=_PAGED, rate_scale=_LION_RATE),
    "paged_lion_8bit": _bnb("Lion", bits=8, values=1.0, gpu=_PAGED, rate_scale=_LION_RATE),
    # From pytorch-optimizer.
    "lion": LibraryOptimizer(  # Chen et al. 2023
        "pytorch_optimizer:Lion",
        package="pytorch_optimizer",
        learning_rate_scale=_LION_RATE,
        state_values=1.0,
    ),
    "soap": Soap("pytorch_optimizer:SOAP", package="pytorch_optimizer"),  # Vyas et al. 2024
    # Zhao et al. 2024, algorithm 1: gradients are projected to the subspace of their singular vectors, which is updated
    # periodically.
    "galore_adamw": _galore("GaLoreAdamW"),
    "galore_adafactor": _galore(
        "GaLoreAdafactor",
        betas=False,
        factored=True,
        fixed={"scale_parameter": False, "relative_step": False},
    ),
    "galore_adamw_8bit": _galore(
        "GaLoreAdamW8bit",
        fixed={"optim_bits": 8, "is_paged": False},
        gpu="galore_torch calls CUDA in every step",
    ),
    # Zhu et al. 2024: a random subspace is enough to scale each channel as AdamW would. APOLLO-Mini is rank 1, scale
    # 128 and scale_type tensor.
    "apollo_adamw": ProjectedOptimizer(
        "apollo_torch:APOLLOAdamW",
        package="apollo_torch",
        projection={
            "rank": 128,
            "proj": "random",
            "scale_type": "channel",
            "update_proj_gap": 200,
            "scale": 1.0,
            "proj_type": "std",
        },
        projectors=(
            "apollo_torch.random_projector:GradientProjector",
            "apollo_torch.svd_projector:GaLoreProjector",
        ),
    ),
    # Defazio et al. 2024, algorithm 1. RAdam needs no warm-up.
    "schedulefree_adamw": ScheduleFree("schedulefree:AdamWScheduleFree"),
    "schedulefree_radam": ScheduleFree("schedulefree:RAdamScheduleFree", warms_up=False),
    "schedulefree_sgd": ScheduleFree(
        "schedulefree:SGDScheduleFree", betas=False, learning_rate_scale=None, state_values=1.0
    ),
}
