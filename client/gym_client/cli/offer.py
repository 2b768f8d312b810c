"""The terms of joining: recipe, data and uploads."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_client.agent.data import Data
from gym_client.agent.global_model import GlobalModel
from gym_client.agent.policy import Policy
from gym_client.agent.work import Setup
from gym_client.cli.announced import (
    announced,
    announced_audit,
    announced_continuous,
    announced_pay,
    announced_region,
    announced_soup_form,
    bytes_to_join,
    rounds_to_come,
)
from gym_client.cli.costs import Costs, RoundTime, update_bytes
from gym_client.hub.traffic import Bandwidth
from gym_client.hub.transport import HubClient
from gym_client.privacy.book import PrivacyBook
from gym_client.privacy.terms import PrivacyTerms, Promises, SecureTerms, make_terms, planned
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.trust.wire.v1 import hub_pb2 as pb

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts


_MANY_PASSES = 5
"""Number of passes over the rows per round from which the offer shows it, since the model may memorize rows."""
_BF16_BYTES = 2
_LEAST_BITS = {"join_download_bytes": 26, "round_download_bytes": 20, "rounds": 6}
"""Lower bounds, in bits, for values that change every round. Changes below 64 MiB, 1 MiB and 64 rounds do not change
the identifier of an offer."""
_OF_REGION = ("the region's members train with their own hub's recipe; only its merged rounds are sent",)
_SPENT = ("epsilon_spent", "epsilon_after_next_round")
"""Fields for the spent part of a hub's privacy budget, which changes while the budget does not."""


@dataclass(frozen=True)
class Offer:
    """The terms of joining, which are displayed and printed as JSON."""

    server: str
    address: str
    fingerprint: str
    contributor: str
    name: str
    base_model: str
    base_digest: str
    recipe: dict[str, Any]
    codec: dict[str, Any]
    update_bytes: int
    bf16_bytes: int
    device: str
    data: str
    num_examples: int
    """Number of rows that the recipe can learn from; signed in the manifest unless it omits counts."""
    privacy: PrivacyTerms
    secure: SecureTerms | None = None
    join_download_bytes: int = 0
    """Announced number of bytes to fetch before the first round."""
    kept_bytes: int = 0
    """Bytes of AdamW moments that are kept on this machine between rounds."""
    round_download_bytes: int = 0
    """Announced approximate number of bytes to fetch per further round."""
    soup_form: str = ""
    """``factors``, ``values`` or ``full``; empty if unknown."""
    pay: dict[str, Any] | None = None
    """The pay terms; None if the hub announces none."""
    seeding: tuple[str, ...] = ()
    """A description of what seeding does on this machine; empty if the hub or the policy does not allow it."""
    mirrors: tuple[str, ...] = ()
    """Addresses of the mirrors; empty if the hub announces none or the policy does not use them."""
    audit: dict[str, Any] | None = None
    """The audit terms; None if the hub has no audits."""
    region: dict[str, Any] | None = None
    """The root hub that receives the hub's merged rounds; None if the hub is not a region."""
    rounds: int | None = None
    """Number of remaining rounds; None if unknown."""
    continuous: dict[str, int] | None = None
    """Settings of continuous rounds; None for synchronous rounds."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Counts of the rows by how they are used; see ``RowCounts``."""
    rows_in_words: tuple[str, ...] = ()
    """A description of the same counts: a warning if many rows are lost, then details."""
    changes: tuple[str, ...] = ()
    """Changes since the terms that were accepted last; empty at the first join."""
    costs: Costs | None = None
    """Training time and downloads; None if nothing was measured."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return asdict(self)

    def fixed_terms(self) -> dict[str, Any]:
        """Return the terms that are identified by the value of ``--accept``.

        These are all terms except those that change between rounds or runs: downloads, remaining rounds, the learning
        rate within a factor of two, the hub's privacy spending, measured costs and the list of changes.
        """
        terms = self.to_dict()
        del terms["costs"], terms["changes"]
        for name, least in _LEAST_BITS.items():
            if terms[name] is not None:
                terms[name] = max(least, terms[name].bit_length())
        terms["recipe"]["learning_rate"] = math.frexp(self.recipe["learning_rate"])[1]
        if (central := terms["privacy"]["central"]) is not None:
            excluded = (*_SPENT, "clipping_norm") if central.get("adaptive_clipping") else _SPENT
            terms["privacy"]["central"] = {
                name: value for name, value in central.items() if name not in excluded
            }
        return terms

    def with_costs(self, time: RoundTime, base_bytes: int, bandwidth: Bandwidth | None) -> Offer:
        """Return a copy of the terms with measured costs.

        Args:
            time: The time of one round.
            base_bytes: Bytes of the base that were fetched in this run.
            bandwidth: The download bandwidth; None if unknown.
        """
        soups = self.join_download_bytes + (self.rounds or 0) * self.round_download_bytes
        return replace(self, costs=Costs.of(time, self.rounds, base_bytes, soups, bandwidth))

    def check(self, policy: Policy) -> None:
        """Raise ``POLICY_REFUSED`` if kept moments or masked votes are too large, which training cannot change."""
        policy.check_optimizer_state(self.kept_bytes)
        if self.secure is not None:
            policy.check_update(self.update_bytes)


def make_offer(
    client: HubClient,
    status: pb.StatusReply,
    model: GlobalModel,
    data: Data,
    setup: Setup,
    name: str,
    rounds: int | None = None,
) -> Offer:
    """Create the offer from the hub's status and this machine's setup. ``rounds`` limits the rounds; None for all.

    Raises:
        GymError: ``BASE_MISMATCH`` for a base other than the federation's; ``POLICY_REFUSED`` for a recipe that
            requires something that contributors do not have.
    """
    model.require_base(status.base_digest, status.base_model)
    recipe, codec = announced(status)
    counts = learned(data, recipe, model.tokenizer) if setup.region is None else None
    private, secure = recipe.privacy is not None, SecureTerms.parse(status.privacy_json)
    plan = planned(recipe, counts.rows) if private and counts is not None else None
    return Offer(
        server=status.name,
        address=str(client.address),
        fingerprint=client.pin.fingerprint,
        contributor=client.pin.contributor or client.home.key.contributor,
        name=name,
        base_model=status.base_model,
        base_digest=status.base_digest,
        recipe=recipe.model_dump(mode="json"),
        codec=codec.model_dump(mode="json"),
        kept_bytes=model.moments_bytes() if recipe.keep_optimizer_state else 0,
        update_bytes=secure.update_bytes(model.base) if secure else update_bytes(model, recipe, codec),
        bf16_bytes=_BF16_BYTES * model.base.num_parameters,
        device=_describe_device(setup.device),
        data=data.description,
        num_examples=0 if counts is None else counts.learned,
        privacy=make_terms(
            recipe,
            Promises.parse(status.privacy_json),
            plan,
            PrivacyBook(client.home),
            data.digest,
            status.num_rounds,
        ),
        secure=secure,
        join_download_bytes=bytes_to_join(client, status),
        round_download_bytes=status.round_download_bytes,
        soup_form=announced_soup_form(status),
        pay=pay.model_dump(mode="json") if (pay := announced_pay(status)) else None,
        seeding=tuple(client.seeding.in_words()) if client.seeding is not None else (),
        mirrors=tuple(client.mirrors.addresses) if client.mirrors is not None else (),
        audit=audit.model_dump(mode="json") if (audit := announced_audit(status)) else None,
        region=region.model_dump(mode="json") if (region := announced_region(status)) else None,
        rounds=rounds_to_come(status, rounds),
        continuous=announced_continuous(status),
        rows={} if counts is None else counts.as_dict(),
        rows_in_words=_OF_REGION if counts is None else _in_words(counts, recipe),
    )


def _in_words(counts: RowCounts, recipe: TrainingRecipe) -> tuple[str, ...]:
    from gym_fed.data.rows import unread_in_words

    is_bad = counts.warning(recipe.max_length) is not None
    seen = recipe.max_steps * recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    often = (
        f", each {seen / counts.learned:.0f} times a round" if seen >= _MANY_PASSES * counts.learned else ""
    )
    rows = f"{'warning: ' if is_bad else ''}{counts.summary()}"
    tokens = counted(counts.tokens, "labelled token") if counts.tokens else ""
    lost = counts.dropped or counts.cut
    what = counts.describe(recipe.max_length) if lost else tokens  # the summary says that all are learned
    remedy = counts.remedy(recipe.max_length) if is_bad else ""
    details = (f"{what}{often}".removeprefix(", "), remedy, unread_in_words(counts.unread))
    return rows, *(text for text in details if text)


def require_rows(data: Data, recipe: TrainingRecipe) -> None:
    """Reject data that the recipe cannot learn from; checked before joining instead of in every round.

    Raises:
        GymError: ``DATA_INVALID`` with the row and the required kind of row.
    """
    from gym_fed.data.rows import iter_kind

    try:
        for _ in iter_kind(data.rows, ALGORITHMS.type_of(recipe.algorithm).row_kind):
            pass
    except GymError as error:
        raise GymError(error.code, f"{error.message} for {recipe.algorithm}", error.hint) from error


def learned(data: Data, recipe: TrainingRecipe, tokenizer: Any) -> RowCounts:
    """Count the rows that a round will learn from, by encoding them in the same way.

    Raises:
        GymError: Errors from ``require_rows``; ``DATA_INVALID`` if no row can be trained on, or if the model's chat
            template rejects a row.
    """
    from gym_fed.base.models import quiet_loading
    from gym_fed.config.hub.round_training import round_training
    from gym_fed.training.rows.encode_part import encode_part
    from gym_fed.training.rows.run_rows import rows_to_learn

    require_rows(data, recipe)
    config = round_training(recipe, 1, Path("unused"))
    with quiet_loading():  # transformers would warn about long rows, which are counted here anyway
        rows = rows_to_learn(config, data.rows)
        _, counts = encode_part(config, ALGORITHMS.new(recipe.algorithm), tokenizer, rows)
    if not counts.learned:  # not for private training, which never skips rows
        raise counts.nothing_learned(recipe.max_length)
    return counts


def _describe_device(name: str) -> str:
    """Describe the device named ``name``."""
    import torch

    from gym_fed.base.models import pick_device

    device = pick_device(name)
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({counted(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else str(device)
