"""Ledgers for the fuzzer: a valid export with many kinds of entries, and a mutator that signs what it changed.

A hostile hub has its own key, and its accomplices have theirs: every hash and signature of a mutated ledger is valid.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gym_fed.config.hub.task import next_digest
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.identity.statements import Revocation, Rotation, Statement, TransferOrder
from gym_fed.trust.ledger.audits import AuditVerdict, SignedVerdict, draw
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.evaluations import commitment, drawn_rows, rows_digest
from gym_fed.trust.ledger.export import first_line, lines
from gym_fed.trust.ledger.heads import HEADS_BEFORE, Head, SignedHead
from gym_fed.trust.ledger.merkle import Tree
from gym_fed.trust.ledger.restored import Restored, SignedRestored
from tests.fuzz.structure import changed, encoded

NOW = 1_700_000_000
SEED = bytes(range(32))
UPDATES = [f"{number:064x}" for number in range(1, 5)]


@cache
def key(number: int) -> SigningKey:
    """Return the key of the hub (0) or of an account; the same in every process, so that a corpus stays valid."""
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number + 1] * 32)))


def export() -> bytes:
    """Return a valid export with keys, transfers, versions, evaluations, an audit and a restore."""
    hub, owner, auditor = server_id(key(0).public_key), key(1), key(2)
    who = owner.contributor
    common: dict[str, Any] = {"server": hub, "issued_at": NOW, "nonce": "0" * 32, "tls": ""}
    order = TransferOrder.model_validate({**common, "from": who, "to": auditor.contributor, "amount": 5})
    rotation = Rotation(**common, rotate=who, new_key=key(3).public_key.hex())
    revocation = Revocation(**common, revoke=who, key=key(3).public_key.hex())
    base, drawn = "sha256:" + "0" * 64, draw(SEED, UPDATES, 4, 1.0, 2)
    first = next_digest(base, "1" * 64, 1, None)
    version = {"parent": base, "soup": "1" * 64, "server_round": 1, "digest": first, "height": 1}
    suite = {
        "limit": 2,
        "tasks": {"t": {"total_rows": 5, "rows_sha256": rows_digest(drawn_rows(SEED, "t", 5, 2))}},
    }
    root = {"root": hub, "root_key": key(0).public_key.hex()}
    verdict = AuditVerdict(
        auditor=auditor.contributor,
        server=hub,
        server_round=1,
        update=UPDATES[0],
        outcome="passed",
        distances={str(step): 0.0 for step in drawn[UPDATES[0]]},
        tolerance=1e-3,
        issued_at_seconds=NOW,
    )
    signed = SignedVerdict.of(verdict, auditor).model_dump(mode="json")
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("enrolled", {"contributor": who, "public_key": owner.public_key.hex(), "name": "\u00c4nn \n"}),
        ("enrolled", {"contributor": auditor.contributor, "public_key": auditor.public_key.hex()}),
        ("evaluation-seed", {"server_round": 1, "commitment": commitment(SEED, 1), "state": "open"}),
        ("note", {"text": "x"}),
        *(("verdict", {"update": one, "contributor": who, "verdict": "admitted"}) for one in UPDATES),
        (
            "version",
            {**version, "soup_bytes": 9, "updates": UPDATES, "heldout_before": 2.0, "heldout_after": 1.0},
        ),
        ("evaluated", {"server_round": 1, "seed": SEED.hex(), "suites": [suite]}),
        (
            "audit-draw",
            {
                "server_round": 1,
                "seed": SEED.hex(),
                "num_steps": 4,
                "task": "1",
                "terms": {"rows": "public", "rate": 1.0, "steps": 2},
                "updates": UPDATES,
                "drawn": drawn,
            },
        ),
        (
            "verdict",
            {"update": UPDATES[0], "contributor": who, "server_round": 1, "verdict": "merged", "reason": ""},
        ),
        ("sealed", {"server_round": 1, "seal": "2" * 64, "record": ""}),
        ("variant", {"contributor": who, "variant": "v", "document": "3" * 64}),
        ("variant-removed", {"contributor": who, "variant": "v"}),
        ("root-version", {**root, "root_size": 1, "version": base, "base": base, "integers": None}),
        ("audited", {"update": UPDATES[0], "contributor": who, "signed": signed}),
        ("credit", {"server_round": 1, "contributor": who, "amount": 5}),
        ("contribution", {"server_round": 1, "without_gain": []}),
        ("royalty", {"usage": "u", "amount": 1, "shares": {who: 1}}),
        ("transfer", {**_moved(order), **_stated(order, owner), "hold_seconds": 0}),
        ("transfer-settled", _moved(order)),
        ("rolled-back", {"from": first, "to": base, "to_height": 0, "newest_height": 1}),
        (
            "rotated",
            {
                "contributor": who,
                "public_key": key(3).public_key.hex(),
                **_stated(rotation, owner),
                "new_signature": rotation.sign(key(3)).hex(),
            },
        ),
        (
            "revoked",
            {
                "contributor": who,
                "public_key": key(3).public_key.hex(),
                "by": "owner",
                "hold_seconds": 10,
                "also_revoked": [owner.public_key.hex()],
                **_stated(revocation, key(3)),
            },
        ),
        ("rebound", {"contributor": who, "public_key": key(4).public_key.hex()}),
        ("restored", {"statement": {"reason": "disk", "lost": None}, "signature": ""}),
    ]
    return signed_export(
        [(kind, {"at": NOW, **body}) for kind, body in bodies], {len(bodies) // 2, len(bodies)}
    )


def mutate_ledger(data: bytes, choice: random.Random) -> bytes:
    """Change, drop, repeat or move an entry; then chain and sign everything again."""
    entries, heads = entries_of(data)
    if not entries:
        return data
    at, other = choice.randrange(len(entries)), choice.randrange(len(entries))
    what = choice.randrange(12)
    if what == 0:
        del entries[at]
    elif what == 1:
        entries.insert(at, entries[other])
    elif what == 2:
        entries[at], entries[other] = entries[other], entries[at]
    elif what == 3:
        entries[at] = (entries[other][0], entries[at][1])
    else:
        body = changed(entries[at][1], choice)
        entries[at] = (entries[at][0], body if isinstance(body, dict) else {"value": body})
    try:
        return signed_export(entries, {*heads, len(entries)})
    except ValueError:  # a number that JSON does not have, which no hub can sign
        return data


def entries_of(data: bytes) -> tuple[list[tuple[str, dict[str, Any]]], set[int]]:
    """Return kinds and bodies of an export's entries, and the sizes of its heads; other lines are skipped."""
    entries, heads = [], set()
    for line in data.splitlines():
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict) and isinstance(document.get("body"), dict) and "kind" in document:
            entries.append((str(document["kind"]), document["body"]))
        elif isinstance(document, dict) and "head" in document:
            heads.add(len(entries))
    return entries, heads


def signed_export(bodies: list[tuple[str, dict[str, Any]]], heads: set[int]) -> bytes:
    """Chain and sign entries, with a signed head after each of the given sizes."""
    entries: list[Entry] = []
    signed: list[SignedHead] = []
    hub = key(0)
    for kind, body in bodies:
        previous = (entries[-1].sequence, entries[-1].hash) if entries else None
        resigned = _resigned(kind, body, previous)
        if type(resigned.get(HEADS_BEFORE, 0)) is int:
            resigned = {**resigned, HEADS_BEFORE: len(signed)}
        entries.append(Entry.following(previous, kind, json.loads(encoded(resigned))))
        if (size := len(entries)) in heads:
            root = Tree([entry.hash for entry in entries]).root(size)
            head = Head("gym-head-1", server_id(hub.public_key), size, entries[-1].hash, root, 1, NOW)
            signed.append(SignedHead.sign(hub, head))
    return "".join(f"{line}\n" for line in [first_line(hub.public_key), *lines(entries, signed)]).encode(
        "utf-8", errors="surrogatepass"
    )


def _resigned(kind: str, body: dict[str, Any], previous: tuple[int, str] | None) -> dict[str, Any]:
    """Sign what hub, owner or auditor signs in an entry of this kind."""
    statement = body.get("statement")
    if kind == "restored" and isinstance(statement, dict) and previous is not None:
        whole = {
            "format": "gym-restored-1",
            "server": server_id(key(0).public_key),
            "restored_at_entry": previous[0],
            "hash": previous[1],
            "at": NOW,
            **{name: value for name, value in statement.items() if name not in ("restored_at_entry", "hash")},
        }
        if set(whole) == set(Restored.__dataclass_fields__):
            return {**body, **SignedRestored.sign(key(0), Restored(**whole)).to_dict()}
        return body
    signed = body.get("signed")
    if isinstance(signed, dict) and isinstance(signed.get("verdict"), dict):
        return {**body, "signed": {**signed, "signature": key(2).sign(signed["verdict"]).hex()}}
    if isinstance(statement, dict) and "signature" in body:
        old = key(3) if kind == "revoked" else key(1)
        body = {**body, "signature": old.sign(statement).hex()}
        if "new_signature" in body:
            body["new_signature"] = key(3).sign(statement).hex()
    return body


def _stated(statement: Statement, owner: SigningKey) -> dict[str, Any]:
    return {"statement": statement.signed(), "signature": statement.sign(owner).hex()}


def _moved(order: TransferOrder) -> dict[str, Any]:
    return {"transfer": order.digest, "from": order.sender, "to": order.to, "amount": order.amount}
