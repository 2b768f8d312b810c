"""Preferences: every key of every algorithm's section changes what is learnt, and every loss of DPO runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.preferences import UNEVEN, config, train
from tests.support.quick import quick

DPO_LOSSES = [
    {"loss_type": "sigmoid_norm"},
    {"loss_type": "hinge"},
    {"loss_type": "ipo"},
    {"loss_type": "exo_pair", "label_smoothing": 1e-3},
    {"loss_type": "nca_pair"},
    {"loss_type": "robust", "label_smoothing": 0.1},
    {"loss_type": "bco_pair"},
    {"loss_type": "sppo_hard"},
    {"loss_type": "aot"},
    {"loss_type": "aot_unpaired"},
    {"loss_type": "apo_zero"},
    {"loss_type": "apo_down"},
    {"loss_type": "discopop"},
    {"loss_type": ["sigmoid", "sft"]},
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    {"loss_type": "discopop", "discopop_tau": 1.0},
    {"beta": 0.5},
    {"ld_alpha": 0.5},
    {"use_weighting": True},
    {"f_divergence_type": "forward_kl"},
    {"f_divergence_type": "js_divergence"},
    {"f_divergence_type": "alpha_divergence"},
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.0},
]
OTHERS = {
    "kto": [
        {"beta": 0.5},
        {"desirable_weight": 2.0},
        {"undesirable_weight": 2.0},
        {"loss_type": "apo_zero_unpaired"},
    ],
    "orpo": [{"beta": 0.5}],
    "simpo": [{"beta": 3.0}, {"gamma": 1.0}, {"cpo_alpha": 0.5}, {"label_smoothing": 0.1}],
    "tdpo": [{"beta": 0.5}, {"alpha": 0.9}, {"variant": 1}],
    "reward_model": [{"center_rewards_coefficient": 1.0}],
}


@pytest.mark.parametrize("algorithm", quick(["dpo", *OTHERS], "kto", "simpo", "tdpo", "reward_model"))
def test_every_setting_changes_the_losses(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    sections: list[dict[str, Any]] = [{}, *(DPO_LOSSES if algorithm == "dpo" else OTHERS[algorithm])]
    seen: list[list[float]] = []
    for number, section in enumerate(sections):
        settings = config(
            tmp_path / str(number),
            algorithm,
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=0.05,
            **{algorithm: section},
        )
        losses = train(tiny_base, settings, UNEVEN).losses
        assert all(math.isfinite(loss) for loss in losses), section
        assert losses not in seen, f"{section} changes nothing"
        seen.append(losses)
