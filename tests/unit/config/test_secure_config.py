"""What a hub that aggregates securely cannot do is refused when its config is read, with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gym_fed.config.hub.server import ServerConfig
from tests.support.private_configs import NOTHING_COMPARED

GOOD: dict[str, Any] = {
    "secure_aggregation": {"threshold": 3, "begin_with": 4, "step_norm": 1.0},
    "soup": {"aggregator": "mean"},
    **NOTHING_COMPARED,
}
PRIVATE = {"mechanism": "discrete_gaussian", "epsilon": 100.0}
NO_STEP = {"threshold": 3, "begin_with": 4}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "screens": ({"gate": {}}, "gate.screen_updates tests single updates; set it to false"),
    "norm-ratio": ({"admission": {}}, "admission.norm_ratio compares single updates; set it to null"),
    "max-norm": ({"admission": {"norm_ratio": None, "max_norm": 1.0}}, "admission.max_norm measures"),
    "rewards": ({"rewards": {}}, "rewards.similarity_threshold"),
    "score": (
        {"rewards": {"score": "estimate"}, "gate": {"heldout": "x", "screen_updates": False}},
        "rewards.score",
    ),
    "root": ({"root": {"data": "x.jsonl"}}, "root judges single updates; remove it"),
    "aggregator": ({"soup": {"aggregator": "median"}}, "use majority_vote or mean"),
    "pre-aggregators": ({"soup": {"pre_aggregators": ["nnm"]}}, "soup.pre_aggregators compare"),
    "malicious clients": ({"soup": {"num_malicious_nodes": 1}}, "masked updates cannot be checked"),
    "clip": ({"soup": {"max_norm": 1.0}}, "soup.max_norm clips single updates"),
    "weights": ({"soup": {"weighting": "num_examples", "num_examples_cap": 9}}, "set it to uniform"),
    "lora": ({"recipe": {"finetuning": "lora"}}, "set finetuning: full"),
    "frozen-a": ({"recipe": {"finetuning": "lora", "lora": {"freeze_a": True}}}, "set finetuning: full"),
    "no-step": ({"secure_aggregation": NO_STEP}, "step_norm is missing"),
    "half": (
        {"secure_aggregation": {"threshold": 3, "begin_with": 6, "step_norm": 1.0}},
        "not more than half of the 6 contributors that begin a round",
    ),
    "too-few": (
        {"secure_aggregation": {"threshold": 4, "begin_with": 3, "step_norm": 1.0}},
        "begin_with 3 is below 4, the minimum at the end of a round",
    ),
    "two-steps": (
        {"privacy": PRIVATE},
        "step_norm has no effect, since privacy.clipping_norm is used; remove it",
    ),
    "gaussian": (
        {"privacy": {"epsilon": 9.0}, "secure_aggregation": NO_STEP},
        "set it to discrete_gaussian",
    ),
}


def test_a_config_that_fits_is_taken_with_and_without_noise() -> None:
    assert ServerConfig.model_validate(GOOD).secure_aggregation is not None
    ServerConfig.model_validate({**GOOD, "soup": {"aggregator": "majority_vote"}})
    ServerConfig.model_validate({**GOOD, "privacy": PRIVATE, "secure_aggregation": NO_STEP})


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_needs_single_updates_is_refused_with_the_remedy(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValidationError) as refused:
        ServerConfig.model_validate({**GOOD, **changes})
    assert message in str(refused.value)


def test_the_config_that_the_guide_shows_is_taken() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "secure-aggregation.md").read_text()
    shown = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert ServerConfig.model_validate(shown).secure_aggregation is not None
