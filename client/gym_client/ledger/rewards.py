"""What a contributor earned, checked against the hub's signed ledger: `gym-client rewards --verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gym_client.hub.heads import Heads
from gym_client.hub.replies import parse_verdicts
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.ledger.copy import LedgerCopy, Progress
from gym_client.ledger.receipts import check_receipt, kept_receipts
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.tables import TextTable
from gym_fed.core.text import counted, with_error
from gym_fed.trust.identity.keys import server_id
from gym_fed.trust.ledger.entries import SEALED, Entry, canonical_text, seal
from gym_fed.trust.ledger.export import verify_file
from gym_fed.trust.ledger.heads import EntryProof, SignedHead
from gym_fed.trust.ledger.merkle import Frontier, Tree
from gym_fed.trust.ledger.restored import KIND as RESTORED
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_PAID = ("merged", "duplicate")
"""Verdicts of updates that can earn credits."""

_TRIES = 3
"""A round may end between the hub's answer and its ledger."""


class Tally:
    """Takes every entry of a ledger, and adds up the contributor's account.

    Args:
        contributor: Whose.

    Attributes:
        credits: Earned, by round.
        royalties: Earned by the use of versions, by usage id.
        verdicts: The last verdict on every update.
        seals: Of verdicts at admission in private rounds, everybody's.
        pending: Transfers that reserve credits, with their amounts.
        moved: Credits received less credits given away, of transfers that are settled.
    """

    def __init__(self, contributor: str) -> None:
        self.contributor = contributor
        self.credits: dict[int, int] = {}
        self.royalties: dict[str, int] = {}
        self.verdicts: dict[str, str] = {}
        self.seals: set[str] = set()
        self.pending: dict[str, int] = {}
        self.moved = 0
        self.entries = 0

    @property
    def balance(self) -> int:
        """Credits that are neither given away nor reserved for it."""
        earned = sum(self.credits.values()) + sum(self.royalties.values())
        return earned + self.moved - sum(self.pending.values())

    def __call__(self, entry: Entry, body: dict[str, Any]) -> None:
        """The next entry."""
        if entry.kind == SEALED:
            self.seals.add(body["seal"])
        if self.contributor not in entry.body_json:
            return
        self.entries += 1
        mine = body.get("contributor") == self.contributor
        if entry.kind == "credit" and mine:
            self.credits[body["server_round"]] = self.credits.get(body["server_round"], 0) + body["amount"]
        elif entry.kind == "verdict" and mine and body.get("update"):
            self.verdicts[body["update"]] = body["verdict"]
        elif entry.kind == "royalty" and self.contributor in body["shares"]:
            self.royalties[body["usage"]] = body["shares"][self.contributor]
        elif entry.kind.startswith("transfer"):
            self._transfer(entry.kind, body)

    def contradictions(self, balance: int, verdicts: list[dict[str, Any]]) -> list[str]:
        """What the hub reports, and its ledger contradicts.

        Args:
            balance: As reported.
            verdicts: Of ``AccountReply.verdicts_json``, parsed.
        """
        found = []
        if balance != self.balance:
            found.append(f"the hub reports a balance of {balance}, its ledger adds up to {self.balance}")
        for reported in verdicts:
            update, server_round = str(reported["update"]), int(reported["server_round"])
            says = self.verdicts.get(update) or self._opened(reported)
            if says != reported["verdict"]:
                found.append(
                    f"update {update[:12]}: the hub reports {reported['verdict']}, its ledger says {says}"
                )
            elif reported["verdict"] in _PAID and reported["credit"] != self.credits.get(server_round, 0):
                found.append(
                    f"round {server_round}: the hub reports {reported['credit']} credits, its ledger says "
                    f"{self.credits.get(server_round, 0)}"
                )
        return found

    def _opened(self, reported: dict[str, Any]) -> str | None:
        """The verdict at admission that the hub reports, if the ledger has its seal."""
        text = [str(reported.get(key, "")) for key in ("manifest", "verdict", "code", "reason")]
        return text[1] if text[0] and seal(*text) in self.seals else None

    def _transfer(self, kind: str, body: dict[str, Any]) -> None:
        sends, gets = (body.get(key) == self.contributor for key in ("from", "to"))
        if kind == "transfer" and sends:
            self.pending[body["transfer"]] = body["amount"]
        elif kind in ("transfer-settled", "transfer-cancelled"):
            self.pending.pop(body["transfer"], None)
            if kind == "transfer-settled":
                self.moved += body["amount"] * (int(gets) - int(sends))


@dataclass(frozen=True)
class Verification:
    """What was checked, in numbers.

    Attributes:
        server: Id of the hub.
        entries: Of the whole ledger.
        heads: Signed ones in it.
        heads_seen: Heads kept here that it was checked against.
        own_entries: Entries that name the contributor.
        receipts: Kept here, each found in it.
        rounds_credited: Rounds that credited the contributor.
        balance: As the ledger adds up.
    """

    server: str
    entries: int
    heads: int
    heads_seen: int
    own_entries: int
    receipts: int
    rounds_credited: int
    balance: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """For people."""
        return (
            f"verified: {counted(self.entries, 'entry')} and {counted(self.heads, 'signed head')} of {self.server}, "
            f"{counted(self.heads_seen, 'head')} seen before, {counted(self.own_entries, 'entry')} about you, "
            f"{counted(self.receipts, 'receipt')}, "
            f"credits of {counted(self.rounds_credited, 'round')}; the balance adds up to {self.balance}"
        )


def verify_online(
    home: Home, client: HubClient, progress: Progress = lambda done, total: None
) -> Verification:
    """Download the ledger as far as it is missing, check all of it, and compare it with what the hub reports.

    Raises:
        GymError: ``STATE_CORRUPT`` naming every lie, ``SIGNATURE_INVALID``, ``LEDGER_FORKED``.
    """
    client.status()
    key = bytes.fromhex(client.pin.ledger_key)
    copy = LedgerCopy(home, key)
    contradictions: list[str] = []
    for _ in range(_TRIES):
        account = client.call("Account", pb.AccountRequest())
        copy.sync(client, progress)
        tally = Tally(client.pin.contributor)
        found = verify_copy(home, copy.path, key, tally)
        contradictions = tally.contradictions(account.balance, parse_verdicts(account.verdicts_json))
        if not contradictions:
            return found
    raise GymError(
        ErrorCode.STATE_CORRUPT,
        f"{found.server} contradicts its own signed ledger: {'; '.join(contradictions)}",
        f"the ledger is in {copy.path}, signed; show it to the other contributors and to the coordinator",
    )


def verify_copy(home: Home, path: Path, key: bytes, tally: Tally) -> Verification:
    """Check a ledger in a file, and every receipt and head of this home against it.

    Args:
        home: The contributor's folder.
        path: An exported ledger, or the own copy.
        key: The hub's.
        tally: Is shown every entry.

    Raises:
        GymError: ``STATE_CORRUPT``, ``SIGNATURE_INVALID``, ``LEDGER_FORKED``.
    """
    server = server_id(key)
    heads = Heads(home, key)
    kept = heads.kept()
    expected = dict(_receipts(home, server, key))
    found: dict[int, str] = {}
    roots: dict[int, str] = {}
    statements: list[str] = []
    frontier = Frontier()

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        tally(entry, body)
        if entry.kind == RESTORED:
            statements.append(canonical_text({**body, "entry": entry.sequence}))
        frontier.append(entry.hash)
        if entry.sequence in expected or entry.sequence in kept:
            found[entry.sequence] = entry.hash
            roots[entry.sequence] = frontier.root() if entry.sequence in kept else ""

    _, checked = verify_file(path, key, visit)
    assert checked.head is not None
    for size, head in sorted(kept.items()):
        if size <= checked.entries and (head.head.hash, head.head.root) != (found[size], roots[size]):
            heads.accuse(
                head,
                heads_in(path),
                lambda sequence, _: proof_in(path, sequence, checked.head),
                lambda: statements,
            )
    for sequence, entry_hash in sorted(expected.items()):
        if sequence > checked.entries:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"the ledger in {path} ends at entry {checked.entries}; a receipt here is of entry {sequence}",
                "it is an older copy, or the hub kept back what it signed; fetch the ledger anew",
            )
        if found[sequence] != entry_hash:
            raise GymError(
                ErrorCode.LEDGER_FORKED,
                f"entry {sequence} of the ledger in {path} is not the one of the receipt that {server} signed",
                f"show {home.receipts_path} and the ledger to the other contributors",
            )
    return Verification(
        server,
        checked.entries,
        checked.heads,
        sum(size <= checked.entries for size in kept),
        tally.entries,
        len(expected),
        sum(amount > 0 for amount in tally.credits.values()),
        tally.balance,
    )


def heads_in(path: Path) -> list[SignedHead]:
    """The signed heads of a ledger in a file that was verified."""
    with path.open("rb") as file:
        return [SignedHead.from_json(row[:-1].decode()) for row in file if row.startswith(b'{"head":')]


def proof_in(path: Path, sequence: int, head: SignedHead | None) -> EntryProof:
    """The proof of an entry of a ledger in a file under its last head."""
    hashes: list[str] = []
    wanted: list[Entry] = []

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        hashes.append(entry.hash)
        if entry.sequence == sequence:
            wanted.append(entry)

    verify_file(path, None, visit)
    if not wanted or head is None:
        raise GymError(ErrorCode.NOT_FOUND, f"{path} has no entry {sequence}")
    path_up = Tree(hashes).inclusion(sequence - 1, head.size) if sequence < head.size else []
    return EntryProof(wanted[0], head, tuple(path_up))


def _receipts(home: Home, server: str, key: bytes) -> list[tuple[int, str]]:
    """Sequence and hash of the entry of every receipt of a hub, each checked by itself."""
    found = []
    for receipt in kept_receipts(home, server):
        if not ({"proof", "ledger_signature"} & set(receipt)):
            continue
        proof = check_receipt(receipt, key)
        if proof is not None:
            found.append((proof.entry.sequence, proof.entry.hash))
        else:
            found.append((int(receipt["ledger_sequence"]), str(receipt["ledger_hash"])))
    return found


def proved_rounds(home: Home, server: str) -> dict[int, list[str]]:
    """The kinds of entries that receipts here prove, by round."""
    found: dict[int, list[str]] = {}
    for receipt in kept_receipts(home, server):
        if "proof" in receipt:
            entry = receipt["proof"]["entry"]
            server_round = entry["body"].get("server_round")
            if isinstance(server_round, int):
                found.setdefault(server_round, []).append(str(entry["kind"]))
    return found


def rewards_table(found: dict[str, Any]) -> TextTable:
    """Balance, reputation and rounds, newest first."""
    title = f"{found['contributor']} at {found['server']}: {found['balance']} credits"
    if found.get("held"):
        title += f", {found['held']} of them held"
    if found.get("reputation") is not None:
        title += f", reputation {found['reputation']:.3f}"
    columns = ("round", "update", "verdict", "score", "credit", "reputation", "receipts")
    table = TextTable(*columns, title=title)
    for row in found["rounds"]:
        score, reputation = row.get("score"), row.get("reputation")
        table.add_row(
            str(row["server_round"]),
            str(row["update"])[:12],
            row["verdict"],
            "" if score is None else with_error(score, row.get("error")),
            str(row["credit"]),
            "" if reputation is None else f"{reputation:.3f}",
            ", ".join(sorted(set(row["receipts"]))),
        )
    return table
