"""Optimisers that need only their class's name; the others have a file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.optimizers._made import MadeOptimizer
from gym_fed.training.optimizers._projected import ProjectedOptimizer
from gym_fed.training.optimizers.base import TrainedWeight, factored_bytes

_BNB = "bitsandbytes.optim"
_LION_RATE = 0.3
"""Chen et al. 2023, section 5: 3 to 10 times smaller than AdamW's, for every step has the same size."""
_PAGED = "its state moves between GPU and main memory"


class Factored(MadeOptimizer):
    """An optimiser whose second moments are a row and a column per matrix; Shazeer and Stern 2018, algorithm 4."""

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return factored_bytes(weight)


class Soap(MadeOptimizer):
    """An optimiser with Adam's moments, and a preconditioner and eigenvectors per side of a matrix; Vyas et al.
    2024."""

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        largest = int(config.optimizer_args.get("max_precondition_dim", 10000))
        sides = weight.shape if len(weight.shape) > 1 else ()
        squares = sum(2 * side * side for side in sides if side <= largest)
        return float(weight.itemsize * (2 * weight.numel + squares))


def _bnb(
    name: str, *, bits: int, values: float = 2.0, gpu: str = "", rate_scale: float = 1.0
) -> MadeOptimizer:
    fixed = {"optim_bits": bits}
    return MadeOptimizer(
        f"{_BNB}:{name}",
        package="bitsandbytes",
        extra="quant",
        gpu=gpu,
        learning_rate_scale=rate_scale,
        fixed={**fixed, "is_paged": True} if gpu else {**fixed, "is_paged": False},
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


TABLE: dict[str, MadeOptimizer] = {
    # Of torch and transformers.
    "sgd": MadeOptimizer(
        "torch.optim:SGD",
        betas=False,
        shards=True,
        per_example=True,
        learning_rate_scale=None,
        state_values=0.0,
    ),
    "adagrad": MadeOptimizer(
        "torch.optim:Adagrad", betas=False, per_example=True, learning_rate_scale=None, state_values=1.0
    ),
    "rmsprop": MadeOptimizer("torch.optim:RMSprop", betas=False, per_example=True, state_values=1.0),
    "adafactor": Factored(  # Shazeer and Stern 2018, with the learning rate that is given
        "transformers:Adafactor",
        betas=False,
        fixed={"scale_parameter": False, "relative_step": False},
        per_example=True,
    ),
    # Dettmers et al. 2022: the state in 8 bits, block by block; small tensors keep 32.
    "adamw_8bit": _bnb("AdamW", bits=8),
    "lion_8bit": _bnb("Lion", bits=8, values=1.0, rate_scale=_LION_RATE),
    "ademamix": _bnb("AdEMAMix", bits=32, values=3.0),  # Pagliardini et al. 2024
    "ademamix_8bit": _bnb("AdEMAMix", bits=8, values=3.0),
    "paged_adamw": _bnb("AdamW", bits=32, gpu=_PAGED),
    "paged_adamw_8bit": _bnb("AdamW", bits=8, gpu=_PAGED),
    "paged_lion": _bnb("Lion", bits=32, values=1.0, gpu=_PAGED, rate_scale=_LION_RATE),
    "paged_lion_8bit": _bnb("Lion", bits=8, values=1.0, gpu=_PAGED, rate_scale=_LION_RATE),
    # Of pytorch-optimizer.
    "lion": MadeOptimizer(
        "pytorch_optimizer:Lion",
        package="pytorch_optimizer",
        learning_rate_scale=_LION_RATE,
        state_values=1.0,
    ),  # Chen et al. 2023
    "soap": Soap("pytorch_optimizer:SOAP", package="pytorch_optimizer"),  # Vyas et al. 2024
    # Zhao et al. 2024, algorithm 1: gradients in the subspace of their own singular vectors, renewed now and then.
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
    # Zhu et al. 2024: a random subspace is enough to scale each channel as AdamW would. Mini: rank 1, scale 128,
    # scale_type tensor.
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
}
