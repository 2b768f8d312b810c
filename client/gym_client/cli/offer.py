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
    SOUP_FORMS,
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
from gym_client.cli.paragraphs import Paragraphs
from gym_client.hub.traffic import Bandwidth
from gym_client.hub.transport import HubClient
from gym_client.privacy.book import PrivacyBook
from gym_client.privacy.terms import PrivacyTerms, Promises, SecureTerms, make_terms, planned
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.credits import PayTerms
from gym_fed.config.hub.region import RegionConfig
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.core.text import counted, plain, quoted, readable_bytes
from gym_fed.trust.wire.v1 import hub_pb2 as pb

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts


_MANY_PASSES = 5
"""Minimum passes over the rows per round that are displayed; a model memorizes rows that it sees often."""
_BF16_BYTES = 2
_ID_CHARS = 12
_LEAST_BITS = {"join_download_bytes": 26, "round_download_bytes": 20, "rounds": 6}
"""Lower bounds (in bits) for values that change every round: below 64 MiB, 1 MiB and 64 rounds, changes do not change
the name of an offer."""
_OF_REGION = ("the region's members train with their own hub's recipe; only what its rounds merge is sent",)
_SPENT = ("epsilon_spent", "epsilon_after_next_round")
"""Spending of a hub's own privacy; its budget is fixed."""


@dataclass(frozen=True)
class Offer:
    """The terms of joining, for display and as JSON."""

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
    """Rows that can be learned, as signed in the manifest where it contains a count."""
    privacy: PrivacyTerms
    secure: SecureTerms | None = None
    join_download_bytes: int = 0
    """Bytes to fetch before the first round, as announced by the hub."""
    kept_bytes: int = 0
    """Bytes of AdamW's moments that are kept here between rounds."""
    round_download_bytes: int = 0
    """Approximate bytes to fetch per further round, as announced by the hub."""
    soup_form: str = ""
    """``factors``, ``values`` or ``full``; empty if unknown."""
    pay: dict[str, Any] | None = None
    """The terms of pay; None if the hub announces none."""
    seeding: tuple[str, ...] = ()
    """What seeding does on this machine, as text; empty if the hub or the policy does not allow it."""
    mirrors: tuple[str, ...] = ()
    """What mirrors do, as text; empty if the hub names none or the policy uses none."""
    audit: dict[str, Any] | None = None
    """The terms of audits; None if the hub has none."""
    region: dict[str, Any] | None = None
    """The root that receives the hub's merged rounds; None if it is not a region."""
    rounds: int | None = None
    """Remaining rounds; None if unknown."""
    continuous: dict[str, int] | None = None
    """Settings of continuous rounds; None for synchronous rounds."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Counts of the given rows by use; see ``RowCounts``."""
    rows_in_words: tuple[str, ...] = ()
    """The same as text, with a warning if much is lost."""
    costs: Costs | None = None
    """Training time and downloads; None if nothing was measured."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return asdict(self)

    def fixed_terms(self) -> dict[str, Any]:
        """Return the terms that ``--accept`` identifies.

        These are all terms except downloads, remaining rounds, a decaying learning rate (apart from doublings), the
        hub's privacy spending, and measured costs, which change between rounds or runs.
        """
        terms = self.to_dict()
        del terms["costs"]
        for name, least in _LEAST_BITS.items():
            if terms[name] is not None:
                terms[name] = max(least, terms[name].bit_length())
        terms["recipe"]["learning_rate"] = math.frexp(self.recipe["learning_rate"])[1]
        if (central := terms["privacy"]["central"]) is not None:
            passing = (*_SPENT, "clipping_norm") if central.get("adaptive_clipping") else _SPENT
            terms["privacy"]["central"] = {
                name: value for name, value in central.items() if name not in passing
            }
        return terms

    def with_costs(self, time: RoundTime, base_bytes: int, bandwidth: Bandwidth | None) -> Offer:
        """Return the same terms with measured costs.

        Args:
            time: The time of one round.
            base_bytes: Bytes of the base, if it was fetched in this run.
            bandwidth: The download bandwidth.
        """
        soups = self.join_download_bytes + (self.rounds or 0) * self.round_download_bytes
        return replace(self, costs=Costs.of(time, self.rounds, base_bytes, soups, bandwidth))

    def check(self, policy: Policy) -> None:
        """Raise ``POLICY_REFUSED`` if kept moments or masked votes exceed the policy; training cannot reduce them."""
        policy.check_optimizer_state(self.kept_bytes)
        if self.secure is not None:
            policy.check_update(self.update_bytes)

    def panel(self) -> Paragraphs:
        """Return the offer as text for a terminal; a usual one takes at most 15 lines of 80 columns."""
        paragraphs = Paragraphs()
        # The address comes first and is never cut, so that no name can imitate another address.
        paragraphs.add("join", f" {plain(self.address, 1000)}: {quoted(self.server)}")
        for label, text in self.lines():
            paragraphs.add(label, f"{label and ': '}{plain(text, 1000)}")
        return paragraphs

    def lines(self) -> list[tuple[str, str]]:
        """Return label and text of every line."""
        ratio = self.bf16_bytes / max(1, self.update_bytes)
        recipe, codec = self.recipe, self.codec
        batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
        written = (
            f"LoRA factors in {codec['factors']}"
            if TUNING.type_of(recipe["finetuning"]).sends_factors
            else f"codec {codec['codec']}"
        )
        key = self.fingerprint or "none: plain text, on this machine only"
        return [
            (
                "leaves this machine",
                f"{self._identity()}; each round:",
            ),
            *self._sent(f"{written}, the bf16 model is {ratio:.1f} x larger"),
            (
                "",
                "a signed manifest: round, digests, loss, time, row and token counts"
                if self.privacy.local is None and self.secure is None
                else "a signed manifest: round, digests, time; no loss, no row or token counts",
            ),
            (
                "never leaves",
                "your data, your private key"
                if self.audit is None
                else "your private key; your data, except in an answer to an audit",
            ),
            *(("privacy" if not number else "", line) for number, line in enumerate(self.privacy.lines())),
            *self._fetched(),
            (
                "runs here",
                f"{recipe['algorithm']}, {recipe['finetuning']}, learning rate "
                f"{recipe['learning_rate']:g}: {counted(recipe['max_steps'], 'step')} of {batch} x "
                f"{counted(recipe['max_length'], 'token')} a round",
            ),
            *self._time(),
            *self._kept(),
            ("", f"base model {quoted(self.base_model)}"),
            *([("pays", PayTerms.model_validate(self.pay).in_words())] if self.pay else []),
            *([("audits", AuditTerms.model_validate(self.audit).in_words())] if self.audit else []),
            *([("goes on", RegionConfig.model_validate(self.region).in_words())] if self.region else []),
            *(("seeding" if not number else "", line) for number, line in enumerate(self.seeding)),
            *(("mirrors" if not number else "", line) for number, line in enumerate(self.mirrors)),
            ("data", self.data),
            *(("", line) for line in self.rows_in_words or (counted(self.num_examples, "example"),)),
            ("hub key", key),
        ]

    def _identity(self) -> str:
        key = f"public key {self.contributor[:_ID_CHARS]}..."
        return f"{key} (also your name)" if self.name == self.contributor else f"name {self.name!r}, {key}"

    def _rounds(self) -> str:
        if self.rounds is None:
            return "rounds until you end it"
        return f"{counted(self.rounds, 'round')} or until you end it"

    def _time(self) -> list[tuple[str, str]]:
        lines = [f"{self._rounds()}, on {self.device}"]
        if self.costs is not None:
            lines.append(self.costs.time_line(self.rounds))
        if self.continuous is not None:
            oldest = counted(self.continuous.get("max_staleness", 0), "version")
            lines.append(
                f"continuous rounds: none waits for you, but an update counts until it is {oldest} old"
            )
        return [("", line) for line in lines]

    def _kept(self) -> list[tuple[str, str]]:
        if not self.kept_bytes:
            return []
        return [("", f"AdamW's moments: {readable_bytes(self.kept_bytes)} here, kept between rounds")]

    def _fetched(self) -> list[tuple[str, str]]:
        form = SOUP_FORMS.get(self.soup_form)
        now = f"{readable_bytes(self.round_download_bytes)} a round{f' ({form})' if form else ''}"
        if self.join_download_bytes:
            now += f", {readable_bytes(self.join_download_bytes)} to join"
        lines = [now if self.costs is None else f"{now}, {self.costs.base_in_words()}"]
        down = self.join_download_bytes + (self.rounds or 0) * self.round_download_bytes
        pace = "" if self.costs is None else self.costs.download_time()
        if self.costs is not None:
            down = self.costs.total_download_bytes
        if self.rounds is not None and self.rounds > 1:
            up = readable_bytes(self.rounds * self.update_bytes)
            total = f"{readable_bytes(down)} down{pace and f', {pace}'}"
            lines.append(f"{counted(self.rounds, 'round')}: {total}, {up} up")
        elif pace:
            lines.append(f"{readable_bytes(down)} in all, {pace}")
        return [("download" if not number else "", line) for number, line in enumerate(lines)]

    def _sent(self, written: str) -> list[tuple[str, str]]:
        size = readable_bytes(self.update_bytes)
        if self.secure is None:
            return [("", f"a delta of at most {size} ({written})")]
        return [
            ("", f"masked votes of at most {size} (the signs of the update's {written})"),
            (
                "",
                "keys of the round, sealed shares of its secrets for up to "
                f"{counted(self.secure.most - 1, 'other')}, signatures: "
                f"at most {readable_bytes(self.secure.message_bytes)}; the hub gets the sum of {self.secure.threshold} "
                "votes or more",
            ),
        ]


def make_offer(
    client: HubClient,
    status: pb.StatusReply,
    model: GlobalModel,
    data: Data,
    setup: Setup,
    name: str,
    rounds: int | None = None,
) -> Offer:
    """Create the offer from the hub's status and this machine; ``rounds`` limits the rounds, None for all.

    Raises:
        GymError: ``BASE_MISMATCH`` for a base other than the federation's; ``POLICY_REFUSED`` for a recipe that
            requires anything a contributor does not have.
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
        mirrors=tuple(client.mirrors.in_words()) if client.mirrors is not None else (),
        audit=audit.model_dump(mode="json") if (audit := announced_audit(status)) else None,
        region=region.model_dump(mode="json") if (region := announced_region(status)) else None,
        rounds=rounds_to_come(status, rounds),
        continuous=announced_continuous(status),
        rows={} if counts is None else counts.as_dict(),
        rows_in_words=_OF_REGION if counts is None else _in_words(counts, recipe),
    )


def _in_words(counts: RowCounts, recipe: TrainingRecipe) -> tuple[str, ...]:
    from gym_fed.data.rows import unread_in_words

    warning = counts.warning(recipe.max_length)
    seen = recipe.max_steps * recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    often = (
        f", each {seen / counts.learned:.0f} times a round" if seen >= _MANY_PASSES * counts.learned else ""
    )
    rows = f"{counts.describe(recipe.max_length)}{often}"
    lines = (rows, unread_in_words(counts.unread), warning and f"warning: {warning}")
    return tuple(line for line in lines if line)


def require_rows(data: Data, recipe: TrainingRecipe) -> None:
    """Reject data that the recipe cannot learn from before joining, instead of in every round.

    Raises:
        GymError: ``DATA_INVALID`` with the row and the required kind.
    """
    from gym_fed.data.rows import iter_kind

    try:
        for _ in iter_kind(data.rows, ALGORITHMS.type_of(recipe.algorithm).row_kind):
            pass
    except GymError as error:
        raise GymError(error.code, f"{error.message} for {recipe.algorithm}", error.hint) from error


def learned(data: Data, recipe: TrainingRecipe, tokenizer: Any) -> RowCounts:
    """Count the rows that a round will learn, by encoding them as the round does.

    Raises:
        GymError: Errors from ``require_rows``; ``DATA_INVALID`` if there is nothing to learn, or the model's chat
            template rejects a row.
    """
    from gym_fed.base.models import quiet_loading
    from gym_fed.config.hub.round_training import round_training
    from gym_fed.training.rows.encode_part import encode_part
    from gym_fed.training.rows.run_rows import rows_to_learn

    require_rows(data, recipe)
    config = round_training(recipe, 1, Path("unused"))
    with quiet_loading():  # transformers would warn about long rows, which are counted here
        rows = rows_to_learn(config, data.rows)
        _, counts = encode_part(config, ALGORITHMS.new(recipe.algorithm), tokenizer, rows)
    if not counts.learned:  # private training skips no rows
        raise counts.nothing_learned(recipe.max_length)
    return counts


def _describe_device(name: str) -> str:
    """Describe the device ``name``."""
    import torch

    from gym_fed.base.models import pick_device

    device = pick_device(name)
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({counted(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else str(device)
