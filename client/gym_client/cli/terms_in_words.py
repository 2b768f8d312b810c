"""Describe the terms of joining as text, starting with what leaves the machine."""

from __future__ import annotations

from rich.text import Text

from gym_client.agent.data import EXAMPLE_NAME
from gym_client.cli.announced import SOUP_FORMS
from gym_client.cli.offer import Offer
from gym_client.cli.paragraphs import MORE, Paragraphs, Term
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.credits import PayTerms
from gym_fed.config.hub.region import RegionConfig
from gym_fed.core.registries import TUNING
from gym_fed.core.text import counted, plain, quoted, readable_bytes

_ID_CHARS, _NAME_CHARS, _DATA_CHARS, _DEVICE_CHARS, _MAX_CHARS = 12, 24, 24, 32, 1000
_CHANGE_CHARS, _ADDRESS_CHARS = 36, 32
_COLUMNS, _MAX_LINES, _FEWEST_CHARS = 80, 15, 8


def offer_panel(offer: Offer) -> Paragraphs:
    """Format an offer as text for a terminal of 80 columns."""
    # The address comes first and is never truncated, so that no name can imitate another address.
    address = plain(offer.address, _MAX_CHARS)
    name = quoted(offer.server, max(_FEWEST_CHARS, _COLUMNS - len(f'join {address}: ""{MORE}')))
    title = Text.assemble(("join", "bold"), f" {address}: {name}")
    return Paragraphs(title, terms_in_words(offer), _MAX_LINES)


def offer_lines(offer: Offer) -> list[tuple[str, str]]:
    """Return the label and text of every term of an offer; each change is a separate line."""
    lines: list[tuple[str, str]] = []
    for term in terms_in_words(offer):
        if term.label == "changed":
            changes = [plain(change, _MAX_CHARS) for change in offer.changes]
            lines += [("" if number else "changed", change) for number, change in enumerate(changes)]
        else:
            lines.append((term.label, term.whole()))
    return lines


def terms_in_words(offer: Offer) -> list[Term]:
    """Describe an offer as a list of terms; each is on one line, with control characters made visible."""
    terms = [
        _leaving(offer),
        Term(
            "never leaves",
            "your data and private key"
            if offer.audit is None
            else "your private key; your data, except in an answer to an audit",
        ),
        Term("privacy", offer.privacy.in_words(), offer.privacy.details()),
        *_passed_on(offer),
        *_seen_by(offer),
        _downloads(offer),
        _work(offer),
        *_pay(offer),
        *_changed(offer),
        _data(offer),
        Term("hub key", offer.fingerprint or "none: plain text, on this machine only"),
    ]
    return [Term(term.label, plain(term.text, _MAX_CHARS), plain(term.details, _MAX_CHARS)) for term in terms]


def _leaving(offer: Offer) -> Term:
    size, codec, secure = readable_bytes(offer.update_bytes), offer.codec, offer.secure
    key = f"public key {offer.contributor[:_ID_CHARS]}..."
    is_named = offer.name != offer.contributor
    who = f"name {plain(offer.name, _NAME_CHARS)!r}, {key}" if is_named else f"{key} (also your name)"
    ratio = f"the bf16 model is {offer.bf16_bytes / max(1, offer.update_bytes):.1f} x larger"
    if secure is not None:
        sent = f"masked votes of at most {size}, {readable_bytes(secure.message_bytes)} of sealed keys"
        written = (
            f"keys for up to {counted(secure.most - 1, 'other')}; the votes are signs, codec {codec['codec']}"
        )
    else:
        sent = f"a delta of at most {size}"
        sends_factors = TUNING.type_of(offer.recipe["finetuning"]).sends_factors
        written = f"LoRA factors in {codec['factors']}" if sends_factors else f"codec {codec['codec']}"
    manifest = "a signed manifest (round, digests, loss, time, row and token counts)"
    if offer.privacy.local is not None or secure is not None:
        manifest = "a signed manifest (round, digests, time)"
    audit = "" if offer.audit is None else f"; {AuditTerms.model_validate(offer.audit).in_words()}"
    return Term("leaves this machine", f"{who}; each round {sent}, {manifest}{audit}", f"{written}, {ratio}")


def _passed_on(offer: Offer) -> list[Term]:
    return [Term("", RegionConfig.model_validate(offer.region).in_words())] if offer.region else []


def _seen_by(offer: Offer) -> list[Term]:
    """Describe who learns the address of this machine, in addition to the hub."""
    who, details = [], list(offer.seeding)
    if offer.seeding:
        who.append("all contributors (seeding)")
    if offer.mirrors:
        more = len(offer.mirrors) - 1
        others = f" and {counted(more, 'other')}" if more else ""
        who.append(f"mirror {plain(offer.mirrors[0], _ADDRESS_CHARS)}{others}")
        details.append(
            f"base, soups and ledger are fetched from {', '.join(offer.mirrors)} first (set mirrors: false in "
            "policy.yaml to use only the hub)"
        )
    return [Term("your address", f"to {', '.join(who)}", "; ".join(details))] if who else []


def _downloads(offer: Offer) -> Term:
    costs, rounds = offer.costs, offer.rounds or 0
    down = offer.join_download_bytes + rounds * offer.round_download_bytes
    form = SOUP_FORMS.get(offer.soup_form)
    parts = [f"{readable_bytes(offer.round_download_bytes)} a round{f' ({form})' if form else ''}"]
    if offer.join_download_bytes:
        parts.append(f"{readable_bytes(offer.join_download_bytes)} to join")
    if costs is not None:
        down = costs.total_download_bytes
        parts += [costs.base_in_words(), *costs.pace_in_words()]
    if rounds < 2:
        total = "" if costs is None else f"{readable_bytes(down)} in all{costs.download_time()}"
        return Term("download", ", ".join(parts), total)
    total = f"{readable_bytes(down)}{costs.download_time() if costs is not None else ''}"
    up = readable_bytes(rounds * offer.update_bytes)
    return Term("download", f"{total} in {counted(rounds, 'round')}, {up} up", ", ".join(parts))


def _work(offer: Offer) -> Term:
    recipe, costs, rounds = offer.recipe, offer.costs, offer.rounds
    text = f"{recipe['algorithm']}, {recipe['finetuning']}"
    if costs is not None:
        text += f", {costs.round_time()}"
    total = "" if costs is None else costs.total_time()
    until = "rounds" if rounds is None else f"{counted(rounds, 'round')}{total} or"
    text += f" on {plain(offer.device, _DEVICE_CHARS)}; {until} until you stop"
    if offer.kept_bytes:
        text += f"; {readable_bytes(offer.kept_bytes)} of AdamW's moments stay here"
    batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    details = [
        f"base model {quoted(offer.base_model)}",
        f"{counted(recipe['max_steps'], 'step')} of {batch} x {counted(recipe['max_length'], 'token')} a round",
        f"learning rate {recipe['learning_rate']:g}",
    ]
    if costs is not None and costs.round_seconds is not None:
        details.append(f"timed: {costs.measured}")
    if offer.continuous is not None:
        oldest = counted(offer.continuous.get("max_staleness", 0), "version")
        details.insert(0, f"continuous: nobody waits for you; an update counts until it is {oldest} old")
    return Term("runs here", text, "; ".join(details))


def _pay(offer: Offer) -> list[Term]:
    if offer.pay is None:
        return []
    pay = PayTerms.model_validate(offer.pay)
    return [Term("pays", pay.in_words(), pay.details())]


def _changed(offer: Offer) -> list[Term]:
    """Describe the changes since the terms that were accepted last."""
    if not offer.changes:
        return []
    first, *others = offer.changes
    text = plain(first, _CHANGE_CHARS)
    if others:
        text += f" and {len(others)} more"
    rest = others if len(first) <= _CHANGE_CHARS else offer.changes
    return [Term("changed", text, "; ".join(rest))]


def _data(offer: Offer) -> Term:
    counts, *details = offer.rows_in_words or (counted(offer.num_examples, "example"),)
    if offer.data == EXAMPLE_NAME:
        details.append("contribute your own with --data FILE")
    return Term("data", f"{_ending(offer.data, _DATA_CHARS)}; {counts}", "; ".join(details))


def _ending(text: str, limit: int) -> str:
    """Return the end of a path, which contains the file's name."""
    return text if len(text) <= limit else f"...{text[3 - limit :]}"
