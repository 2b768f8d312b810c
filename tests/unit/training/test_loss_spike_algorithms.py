"""Which algorithms may go back after a spike follows from what their losses measure."""

from __future__ import annotations

from typing import Any

import pytest

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.run.spikes import check_spikes

TAUGHT = ("distillation", "sequence_distillation")
REFUSED = ("gradient_difference", "grpo", "gspo", "npo", "ppo", "rloo")


def config(algorithm: str, **section: Any) -> TrainingConfig:
    teacher = {"teacher": "gym-nano"} if algorithm in TAUGHT else {}
    sections = {algorithm: {**teacher, **section}} if teacher or section else {}
    return TrainingConfig(algorithm=algorithm, loss_spikes={"rollback": False}, **sections)


@pytest.mark.parametrize("algorithm", ALGORITHMS.own())
def test_spikes_are_looked_for_where_the_loss_is_of_the_data(algorithm: str) -> None:
    given = config(algorithm)
    assert ALGORITHMS.new(algorithm).loss_measures_rows(given) == (algorithm not in REFUSED)
    if algorithm in REFUSED:
        with pytest.raises(GymError, match=f"loss_spikes: the loss of {algorithm} does not measure"):
            check_spikes(given)
    else:
        check_spikes(given)


def test_on_policy_distillation_learns_from_its_own_words_and_is_refused() -> None:
    check_spikes(config("distillation", lmbda=0.0))
    with pytest.raises(GymError, match="the loss of distillation does not measure"):
        check_spikes(config("distillation", lmbda=0.5))
