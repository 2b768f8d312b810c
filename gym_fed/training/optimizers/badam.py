"""BAdam: Adam on one block of layers at a time, so that only the state of one block is in memory.

Luo et al. 2024, "BAdam: A Memory Efficient Full Parameter Optimization Method for Large Language Models".
"""

from __future__ import annotations

import warnings
from contextlib import redirect_stdout
from functools import cache
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.requirements import require_package
from gym_fed.training.optimizers.base import (
    LibraryOptimizer,
    check_known,
    create_checked,
    import_class,
    refuse_adapters,
    split,
)

_MODES = ("descending", "ascending", "random", "fixed")
_OWN = {
    "switch_block_every": 50,
    "switch_mode": "descending",
    "start_block": None,
    "include_embedding": False,
    "include_lm_head": False,
}


class BAdam(LibraryOptimizer):
    """``badam.BlockOptimizer`` around torch's AdamW. Its ratio variant is not offered, since it fails on CPUs."""

    whole_weights = True
    of_one_model = "trains the layers of one model in turn"
    of_one_process = "freezes and unfreezes weights, so several processes would no longer share gradients"

    def __init__(self) -> None:
        super().__init__("badam:BlockOptimizer", package="badam")

    def check(self, config: TrainingConfig) -> None:
        require_package("badam", "optimizer: badam", self.extra)
        refuse_adapters(config, "trains whole layers in turn")
        check_known(config, [*_OWN, "eps"])
        values = {**_OWN, **config.optimizer_args}
        mode, has_start = values["switch_mode"], values["start_block"] is not None
        unused = "start_block has no effect with switch_mode random"
        refuse_first(
            (mode not in _MODES, f"switch_mode {mode!r} is unknown", f"one of {', '.join(_MODES)}"),
            (mode == "random" and has_start, unused, "remove it"),
            (mode == "fixed" and not has_start, "switch_mode fixed needs start_block", "set it"),
            prefix="optimizer_args: ",
        )
        for name, lowest in (("switch_block_every", 1), ("start_block", 0)):
            value = values[name]
            is_invalid = value != _OWN[name] and (not isinstance(value, int) or value < lowest)
            reason = f"optimizer_args: {name} is {value!r}"
            refuse_first((is_invalid, reason, f"use an integer of at least {lowest}"))
        for name in ("include_embedding", "include_lm_head"):
            reason = f"optimizer_args: {name} is {values[name]!r}"
            refuse_first((not isinstance(values[name], bool), reason, "use true or false"))
        self.try_arguments(config)

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        """Create the inner AdamW with the arguments that are not BAdam's own."""
        import torch

        arguments: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": (config.adam_beta1, config.adam_beta2),
            "weight_decay": config.weight_decay,
            **{name: value for name, value in config.optimizer_args.items() if name not in _OWN},
        }
        return create_checked(config, lambda: torch.optim.AdamW(groups, **arguments))

    def make(self, model: Any, config: TrainingConfig) -> Any:
        weights = split(model, config)
        own = {name: config.optimizer_args.get(name, default) for name, default in _OWN.items()}
        adam = self.construct([value for _, value, _ in weights], config)
        named = [(name, value) for name, value, _ in weights]

        def create() -> Any:
            optimizer_class = _resumable(import_class(self.source))
            return optimizer_class(base_optimizer=adam, named_parameters_list=named, verbose=0, **own)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="BAdam expect")  # float32 weights only cost memory
            try:
                return create_checked(config, create)
            except IndexError as error:
                reason = (
                    f"optimizer_args: start_block is {own['start_block']}, but the model has fewer blocks"
                )
                raise GymError(ErrorCode.CONFIG_INVALID, reason, "blocks are numbered from 0") from error


@cache
def _resumable(block_optimizer: Any) -> Any:
    """Return a subclass that prints nothing to stdout, and whose state contains the block and its float32 weights."""
    import torch

    class Resumable(block_optimizer):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            with redirect_stdout(None):
                super().__init__(**arguments)
            del self.__dict__["state_dict"]  # the library's own, which covers only the inner optimiser

        def switch_trainable_params(self, verbose: int | None = 0) -> None:
            self._active_block = self.current_block_idx
            super().switch_trainable_params(0)

        def _update_active_block_idx(self) -> None:
            with redirect_stdout(None):
                super()._update_active_block_idx()

        def state_dict(self) -> dict[str, Any]:
            saved: dict[str, Any] = self.base_optimizer.state_dict()
            saved["blocks"] = {
                "active": self._active_block,
                "next": self.current_block_idx,
                "order": list(getattr(self, "block_order", [])),
                "step": self.global_step,
                "lr": float(self.param_groups[0]["lr"]),
                "weights": [value.detach().clone() for value in self.param_idx2hp.values()],
            }
            return saved

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            blocks = state_dict["blocks"]
            self.current_block_idx = blocks["active"]
            self.switch_trainable_params()
            self.current_block_idx, self.global_step = blocks["next"], blocks["step"]
            if hasattr(self, "block_order"):
                self.block_order = list(blocks["order"])
            with torch.no_grad():
                for value, saved in zip(self.param_idx2hp.values(), blocks["weights"], strict=True):
                    value.copy_(saved)
            inner = {key: value for key, value in state_dict.items() if key != "blocks"}
            self.base_optimizer.load_state_dict(inner)
            for group in self.param_groups:  # the schedule sets these; a step copies them to the inner groups
                group["lr"] = blocks["lr"]

    return Resumable
