"""A hub's config with a codec that leaves out most weights: what it refuses, and what its records keep."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe
from tests.support.private_configs import NOTHING_COMPARED

SPARSE = {"codec": "sparse_sign"}
VOTES = {"mechanism": "discrete_gaussian", "epsilon": 100.0}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "median": ({"soup": {"aggregator": "median"}}, "'median' decides coordinate by coordinate"),
    "bulyan": ({"soup": {"aggregator": "bulyan"}}, "'bulyan' decides coordinate by coordinate"),
    "embeddings": (
        {"soup": {"aggregator": "median"}, "codec": {"embeddings": "sparse_sign"}},
        "updates of codec 'sparse_sign'",
    ),
    "small": (
        {"soup": {"aggregator": "median"}, "codec": {"small_tensors": "sparse_sign"}},
        "updates of codec 'sparse_sign'",
    ),
    "secure": (
        {"secure_aggregation": {"threshold": 3, "begin_with": 4, "step_norm": 1.0}, **NOTHING_COMPARED},
        "whose votes would be 0; use bitdelta",
    ),
    "votes": ({"privacy": VOTES, **NOTHING_COMPARED}, "whose votes would be 0; use bitdelta"),
    "lora": ({"recipe": {"finetuning": "lora"}}, "is for full updates, not for LoRA factors"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_needs_most_weights_of_an_update_is_refused_with_a_sparse_codec(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValidationError) as refused:
        ServerConfig.model_validate({"soup": {"aggregator": "mean"}, "codec": SPARSE, **changes})
    assert message in str(refused.value)


def test_rules_on_whole_updates_take_a_sparse_codec() -> None:
    for rule in ("mean", "byzantine_robust", "byzantine_evidence"):
        ServerConfig.model_validate({"soup": {"aggregator": rule}, "codec": SPARSE})


def test_the_decay_of_a_sparse_codec_is_in_what_is_recorded_of_a_policy() -> None:
    for kept in ({}, {"exclude_unset": True}, {"exclude_defaults": True}):
        assert CodecPolicy(codec="sparse_sign").model_dump(**kept)["feedback_decay"] == 0.95


def test_kept_optimizer_state_is_taken_with_secure_aggregation_and_refused_with_audits() -> None:
    recipe = {"keep_optimizer_state": True}
    secure = {"threshold": 3, "begin_with": 4, "step_norm": 1.0}
    ServerConfig.model_validate(
        {
            "recipe": recipe,
            "secure_aggregation": secure,
            "soup": {"aggregator": "mean"},
            **NOTHING_COMPARED,
        }
    )
    with pytest.raises(ValidationError, match="audit: only LoRA updates are audited"):
        TaskSpec(
            server="s" + "0" * 16,
            server_round=1,
            base_model="base",
            base_digest="sha256:" + "0" * 64,
            version_digest="sha256:" + "0" * 64,
            recipe=TrainingRecipe(keep_optimizer_state=True),
            max_update_bytes=1,
            deadline_seconds=1.0,
            audit=AuditTerms(rows="public"),
        )
    audit = {"rounds": {"audit": {"rows": "public", "auditors": ["a" * 16]}}}
    with pytest.raises(ValidationError, match="audits repeat steps of LoRA"):
        ServerConfig.model_validate({"recipe": recipe, **audit})
    with pytest.raises(ValidationError, match="keep_optimizer_state: lora trains new factors every round"):
        ServerConfig.model_validate({"recipe": {**recipe, "finetuning": "lora"}, **audit})
