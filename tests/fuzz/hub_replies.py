"""Fuzz targets for a hub's replies: the status that contributors read before they agree, tasks and the account."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from tests.fuzz.structure import mutate_json
from tests.fuzz.target import Target, scratch

_DIGEST = "sha256:" + "0" * 64


def read_status(data: bytes) -> None:
    """Parse a ``StatusReply``, given as JSON, and display the terms of joining."""
    from gym_client.agent.policy import Policy
    from gym_client.base.offer import BaseOffer
    from gym_client.cli.announced import announced_mirrors, announced_seeding
    from gym_client.cli.terms_in_words import offer_lines, offer_panel
    from gym_client.privacy.terms import Promises, check_promises

    from gym_fed.trust.ledger.heads import SignedHead
    from gym_fed.trust.ledger.restored import SignedRestored
    from gym_fed.trust.wire.v1 import hub_pb2 as pb

    status = _message(pb.StatusReply, data)
    if status is None:
        return
    promises = Promises.parse(status.privacy_json)
    check_promises(Policy(), promises)
    if (base := BaseOffer.of(status)) is not None:
        base.lines()
    announced_seeding(status)
    announced_mirrors(status)
    offer = _offer(status)
    assert offer.to_dict()
    assert offer.fixed_terms()
    offer_lines(offer)
    str(offer_panel(offer))
    if status.ledger_head_json:
        SignedHead.from_json(status.ledger_head_json)
    for statement in status.restored_json:
        SignedRestored.from_json(statement)


def _offer(status: Any) -> Any:
    """Return the terms of joining for rows that are not read; compare ``gym_client.cli.offer.make_offer``."""
    from gym_client.cli.announced import (
        announced,
        announced_audit,
        announced_continuous,
        announced_pay,
        announced_region,
        announced_soup_form,
        rounds_to_come,
    )
    from gym_client.cli.offer import Offer
    from gym_client.privacy.book import PrivacyBook
    from gym_client.privacy.terms import Promises, SecureTerms, make_terms, planned

    recipe, codec = announced(status)
    plan = planned(recipe, 100) if recipe.privacy is not None else None
    book = PrivacyBook(SimpleNamespace(folder=scratch()))  # type: ignore[arg-type]
    promises = Promises.parse(status.privacy_json)
    pay, audit, region = announced_pay(status), announced_audit(status), announced_region(status)
    return Offer(
        server=status.name,
        address="hub.example:9443",
        fingerprint="0" * 64,
        contributor="c" + "0" * 32,
        name="name",
        base_model=status.base_model,
        base_digest=status.base_digest,
        recipe=recipe.model_dump(mode="json"),
        codec=codec.model_dump(mode="json"),
        update_bytes=1000,
        bf16_bytes=16_000,
        device="cpu",
        data="rows.jsonl",
        num_examples=100,
        privacy=make_terms(recipe, promises, plan, book, "0" * 64, status.num_rounds),
        secure=SecureTerms.parse(status.privacy_json),
        join_download_bytes=status.join_download_bytes,
        round_download_bytes=status.round_download_bytes,
        soup_form=announced_soup_form(status),
        pay=None if pay is None else pay.model_dump(mode="json"),
        audit=None if audit is None else audit.model_dump(mode="json"),
        region=None if region is None else region.model_dump(mode="json"),
        rounds=rounds_to_come(status, None),
        continuous=announced_continuous(status),
    )


def status_seeds() -> list[bytes]:
    """The status of a plain hub, and of a hub with private and secure rounds, pay and a base to fetch."""
    from gym_fed.config.delta import CodecPolicy
    from gym_fed.config.hub.audit import AuditTerms
    from gym_fed.config.hub.credits import RewardsConfig
    from gym_fed.config.hub.seeding import SeedingTerms
    from gym_fed.config.hub.task import TrainingRecipe

    terms: dict[str, Any] = {
        "recipe": TrainingRecipe().model_dump(mode="json"),
        "codec": CodecPolicy().model_dump(mode="json"),
        "pay": RewardsConfig().terms().model_dump(mode="json"),
        "soup": {"form": "factors"},
        "rounds_left": 3,
    }
    plain = {"name": "hub", "base_model": "base", "base_digest": _DIGEST, "recipe_json": json.dumps(terms)}
    private = TrainingRecipe.model_validate(
        {"privacy": {"noise_multiplier": 1.0}, "gradient_accumulation_steps": 1}
    )
    terms |= {
        "recipe": private.model_dump(mode="json"),
        "audit": AuditTerms(rows="public").model_dump(mode="json"),
        "seeding": SeedingTerms(min_bytes=1).model_dump(mode="json"),
        "continuous": {"merge_every": 4, "max_staleness": 2},
    }
    central = {
        "epsilon": 4.0,
        "target_delta": 1e-5,
        "epsilon_spent": 1.0,
        "epsilon_after_next_round": 1.5,
        "adaptive_clipping": True,
        "clipping_norm": 1.0,
        "aggregator": "mean",
    }
    base = {"bytes": 10, "files": 1, "listing_sha256": "0" * 64, "licence": "mit", "public_name": "a/b"}
    whole = {
        **plain,
        "num_rounds": 10,
        "version_height": 2,
        "recipe_json": json.dumps(terms),
        "privacy_json": json.dumps({"central": central, "secure_aggregation": {"threshold": 3}}),
        "base_json": json.dumps(base),
        "join_download_bytes": 1000,
        "round_download_bytes": 100,
    }
    return [json.dumps(plain).encode(), json.dumps(whole).encode()]


def read_task(data: bytes) -> None:
    """Parse a task and check it against the terms and the policy."""
    from gym_client.agent.agreement import Terms
    from gym_client.agent.policy import Policy
    from gym_client.agent.work import parse_task
    from gym_client.privacy.terms import Promises, require_as_announced, require_sums

    from gym_fed.config.delta import CodecPolicy
    from gym_fed.config.hub.task import TrainingRecipe, bytes_to_join
    from gym_fed.core.text import readable_bytes

    spec = parse_task(data.decode("utf-8", errors="replace"))
    agreed = Terms.of("s" + "0" * 16, _DIGEST, TrainingRecipe(), CodecPolicy(), "", "0" * 64)
    agreed.changes(agreed.with_task(spec))
    require_as_announced(TrainingRecipe(), spec.recipe)
    require_sums(Promises(), spec.secure_aggregation)
    readable_bytes(spec.max_update_bytes)
    readable_bytes(bytes_to_join(spec.soups))
    Policy().check(spec)


def task_seeds() -> list[bytes]:
    """The task of a first round, and one after a soup that can be summed."""
    from gym_fed.config.hub.credits import RewardsConfig
    from gym_fed.config.hub.task import SoupReference, TaskSpec, next_digest

    first = TaskSpec(
        server="s" + "0" * 16,
        server_round=1,
        base_model="base",
        base_digest=_DIGEST,
        version_digest=_DIGEST,
        max_update_bytes=1000,
        deadline_seconds=2e9,
        pay=RewardsConfig().terms(),
        evaluated_on={"suite": "0" * 64},
    )
    after = next_digest(_DIGEST, "1" * 64, 1, _DIGEST)
    soup = SoupReference(
        server_round=1,
        sha256="1" * 64,
        size_bytes=10,
        version_digest=after,
        integers=_DIGEST,
        sum_sha256="3" * 64,
        sum_bytes=20,
    )
    second = first.model_copy(update={"server_round": 2, "version_digest": after, "soups": [soup]})
    return [spec.model_dump_json().encode() for spec in (first, second)]


def read_account(data: bytes) -> None:
    """Parse an ``AccountReply`` with its receipts, given as JSON, and display it."""
    from gym_client.agent.account import spent_in_words
    from gym_client.hub.replies import parse_account, parse_receipt, parse_variant_receipt, parse_verdicts
    from gym_client.ledger.rewards import rewards_table

    from gym_fed.trust.wire.v1 import hub_pb2 as pb

    try:
        document = json.loads(data)
        receipts = [str(document.pop(key, "{}")) for key in ("receipt", "variant_receipt")]
    except (ValueError, RecursionError, AttributeError, TypeError):
        return
    account = _message(pb.AccountReply, json.dumps(document).encode())
    if account is None:
        return
    parse_receipt(receipts[0])
    parse_variant_receipt(receipts[1])
    verdicts = parse_verdicts(account.verdicts_json)
    worth = parse_account(account.rewards_json)
    if worth.get("privacy"):
        spent_in_words(worth["privacy"])
    rounds = [{**row, "receipts": []} for row in worth.pop("rounds", verdicts)]
    totals = {"server": "hub", "contributor": account.contributor, "balance": account.balance}
    rewards_table({**worth, **totals, "rounds": rounds})


def account_seeds() -> list[bytes]:
    scored = {
        "server_round": 1,
        "update": "0" * 64,
        "verdict": "merged",
        "credit": 5,
        "reason": "",
        "method": "loo",
        "score": 0.25,
        "error": 0.01,
        "similarity": 0.5,
        "reputation": 0.5,
    }
    worth = {
        "balance": 10,
        "available": 9,
        "held": 1,
        "reserved": 0,
        "transfers": [],
        "reputation": 0.5,
        "owed": 1,
        "is_new": True,
        "rounds": [scored],
        "privacy": {"epsilon": 1.0, "rounds": 2, "target_delta": 1e-5},
    }
    verdict = {key: scored[key] for key in ("update", "server_round", "verdict", "reason", "credit")}
    receipt = {"verdict": "admitted", "update": "0" * 64, "ledger_sequence": 3, "ledger_hash": "0" * 64}
    document = {
        "contributor": "c" + "0" * 32,
        "balance": 10,
        "rewards_json": json.dumps(worth),
        "verdicts_json": [json.dumps({**verdict, "bytes": 100, "entries": [1, 2]})],
        "receipt": json.dumps(receipt),
        "variant_receipt": json.dumps({"variant": "a", "revision": 1, "proof": {}}),
    }
    return [json.dumps(document).encode()]


def _message(kind: Any, data: bytes) -> Any:
    """Return the protobuf message with the fields of a JSON object; None if no message can hold them."""
    try:
        return kind(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None


TARGETS: dict[str, Target] = {
    "status": Target(
        status_seeds,
        read_status,
        ("gym_client.cli", "gym_client.privacy", "gym_client.hub"),
        mutate=mutate_json,
    ),
    "task": Target(task_seeds, read_task, ("gym_client.agent", "gym_fed.config"), mutate=mutate_json),
    "account": Target(
        account_seeds, read_account, ("gym_client.hub", "gym_client.ledger"), mutate=mutate_json
    ),
}
