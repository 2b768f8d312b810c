"""What cannot be audited is refused when the hub's config is read, and contributors agree to what can."""

from __future__ import annotations

from typing import Any

import pytest
from gym_client.agent.agreement import Terms
from pydantic import ValidationError

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import TrainingRecipe

AUDIT = {"rows": "public", "auditors": ["c" + "0" * 32]}
LORA = {"finetuning": "lora"}
GOOD: dict[str, Any] = {"rounds": {"audit": AUDIT}, "recipe": LORA}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"recipe": {}}, "recipe.finetuning audits repeat steps of LoRA"),
    "dropout": (
        {"recipe": {**LORA, "lora": {"lora_dropout": 0.1}}},
        "recipe.lora.lora_dropout uses random numbers",
    ),
    "algorithm": ({"recipe": {**LORA, "algorithm": "dpo"}}, "recipe.algorithm dpo cannot be audited"),
    "codec": ({"codec": {"factors": "int4"}}, "codec.factors 'int4' loses more"),
    "steps": ({"recipe": {**LORA, "max_steps": 1}}, "rounds.audit.steps 2 is more than recipe.max_steps, 1"),
    "long": ({"recipe": {**LORA, "max_steps": 20_000}}, "recipe.max_steps 20000 is too large for audits"),
    "privacy": ({"privacy": {"epsilon": 8.0}}, "privacy hides updates"),
    "rows": ({"rounds": {"audit": {"auditors": ["c"]}}}, "rows\n  Field required"),
    "nobody": ({"rounds": {"audit": {**AUDIT, "auditors": []}}}, "auditors\n  List should have at least 1"),
    "private rows": (
        {"rounds": {"audit": {**AUDIT, "rows": "private"}}},
        "Input should be 'public' or 'disclosed'",
    ),
}


def test_a_hub_has_no_audits_unless_it_says_whose_rows_and_who_audits() -> None:
    assert ServerConfig().rounds.audit is None
    assert not ServerConfig().draws_by_seed
    config = ServerConfig.model_validate(GOOD)
    assert config.draws_by_seed
    audit = config.rounds.audit
    assert audit is not None
    assert audit.terms() == AuditTerms(rows="public", rate=0.1, steps=2, tolerance=1e-3)


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_audited_is_refused_with_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ServerConfig.model_validate({**GOOD, **changes})
    assert message in str(caught.value)


def test_audits_that_begin_or_change_are_a_change_of_terms() -> None:
    def terms(audit: AuditTerms | None) -> Terms:
        recipe, codec = TrainingRecipe(finetuning="lora"), CodecPolicy()
        return Terms.of("s" + "0" * 16, "sha256:" + "0" * 64, recipe, codec, "", "data", None, audit)

    none, public = terms(None), terms(AuditTerms(rows="public"))
    assert not any(key.startswith("audit") for key in none.asked)
    assert 'audit.rows: null -> "public"' in none.changes(public)
    assert public.changes(terms(AuditTerms(rows="disclosed"))) == ['audit.rows: "public" -> "disclosed"']
