"""A contributor's rewards, verified against the hub's signed ledger."""

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
from gym_fed.core.console import TextTable
from gym_fed.core.errors import ErrorCode, GymError
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
"""Number of attempts, since a round may end between the account reply and the download of the ledger."""


class Tally:
    """Ledger visitor that computes the state of a contributor's account.

    Args:
        contributor: The contributor's id.

    Attributes:
        credits: Credits earned in rounds, by round.
        royalties: Credits earned from the use of versions, by usage id.
        verdicts: Last verdict on every update.
        seals: Seals of all admission verdicts in private rounds.
        pending: Reserved amounts, by pending transfer.
        moved: Credits received minus credits sent, in settled transfers.
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
        """The credits that are neither sent nor reserved."""
        earned = sum(self.credits.values()) + sum(self.royalties.values())
        return earned + self.moved - sum(self.pending.values())

    def __call__(self, entry: Entry, body: dict[str, Any]) -> None:
        """Process the next entry."""
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
        """List the contradictions between the hub's reports and its ledger.

        Args:
            balance: The balance that the hub reports.
            verdicts: The parsed verdicts from ``AccountReply.verdicts_json``.
        """
        contradictions = []
        if balance != self.balance:
            contradictions.append(
                f"the hub reports a balance of {balance}, but its ledger adds up to {self.balance}"
            )
        for reported in verdicts:
            update, server_round = str(reported["update"]), int(reported["server_round"])
            says = self.verdicts.get(update) or self._opened(reported)
            if says != reported["verdict"]:
                contradictions.append(
                    f"update {update[:12]}: the hub reports {reported['verdict']}, but its ledger says {says}"
                )
            elif reported["verdict"] in _PAID and reported["credit"] != self.credits.get(server_round, 0):
                contradictions.append(
                    f"round {server_round}: the hub reports {counted(reported['credit'], 'credit')}, but its ledger "
                    f"says {self.credits.get(server_round, 0)}"
                )
        return contradictions

    def _opened(self, reported: dict[str, Any]) -> str | None:
        """Return the reported admission verdict if the ledger contains its seal."""
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
    """The results of a successful verification.

    Attributes:
        server: Id of the hub.
        entries: Number of entries in the ledger.
        heads: Number of signed heads in the ledger.
        heads_seen: Number of stored heads that the ledger was checked against.
        own_entries: Number of entries that name the contributor.
        receipts: Number of stored receipts, all found in the ledger.
        rounds_credited: Number of rounds that credited the contributor.
        balance: Balance according to the ledger.
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
        """Summarize the verification in one line."""
        return (
            f"verified: {counted(self.entries, 'entry')} and {counted(self.heads, 'signed head')} of {self.server}, "
            f"{counted(self.heads_seen, 'head')} seen before, {counted(self.own_entries, 'entry')} about you, "
            f"{counted(self.receipts, 'receipt')}, "
            f"credits of {counted(self.rounds_credited, 'round')}; the balance adds up to {self.balance}"
        )


def verify_online(
    home: Home, client: HubClient, progress: Progress = lambda done, total: None
) -> Verification:
    """Download and verify the ledger, and compare it with the hub's reports.

    Raises:
        GymError: ``STATE_CORRUPT`` with all contradictions, ``SIGNATURE_INVALID``, ``LEDGER_FORKED``.
    """
    client.status()
    key = bytes.fromhex(client.pin.ledger_key)
    copy = LedgerCopy(home, key)
    contradictions: list[str] = []
    for _ in range(_TRIES):
        account = client.call("Account", pb.AccountRequest())
        copy.sync(client, progress)
        tally = Tally(client.pin.contributor)
        verification = verify_copy(home, copy.path, key, tally)
        contradictions = tally.contradictions(account.balance, parse_verdicts(account.verdicts_json))
        if not contradictions:
            return verification
    raise GymError(
        ErrorCode.STATE_CORRUPT,
        f"{verification.server} contradicts its own signed ledger: {'; '.join(contradictions)}",
        f"the signed ledger is in {copy.path}; show it to the other contributors and to the coordinator",
    )


def verify_copy(home: Home, path: Path, key: bytes, tally: Tally) -> Verification:
    """Verify a ledger file, and check the home's receipts and heads against it.

    Args:
        home: The contributor's home.
        path: An exported ledger, or the home's copy.
        key: Ledger key of the hub.
        tally: Visitor that processes every entry.

    Raises:
        GymError: ``STATE_CORRUPT``, ``SIGNATURE_INVALID``, ``LEDGER_FORKED``.
    """
    server = server_id(key)
    heads = Heads(home, key)
    known_heads = heads.kept()
    expected = dict(_receipts(home, server, key))
    hashes: dict[int, str] = {}
    roots: dict[int, str] = {}
    statements: list[str] = []
    frontier = Frontier()

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        tally(entry, body)
        if entry.kind == RESTORED:
            statements.append(canonical_text({**body, "entry": entry.sequence}))
        frontier.append(entry.hash)
        if entry.sequence in expected or entry.sequence in known_heads:
            hashes[entry.sequence] = entry.hash
            roots[entry.sequence] = frontier.root() if entry.sequence in known_heads else ""

    _, checked = verify_file(path, key, visit)
    assert checked.head is not None
    for size, head in sorted(known_heads.items()):
        if size <= checked.entries and (head.head.hash, head.head.root) != (hashes[size], roots[size]):
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
                f"the ledger in {path} ends at entry {checked.entries}, but a stored receipt is for entry {sequence}",
                "it is an older copy, or the hub withheld entries that it signed; fetch the ledger again",
            )
        if hashes[sequence] != entry_hash:
            raise GymError(
                ErrorCode.LEDGER_FORKED,
                f"entry {sequence} of the ledger in {path} does not match the receipt that {server} signed",
                f"show {home.receipts_path} and the ledger to the other contributors",
            )
    return Verification(
        server,
        checked.entries,
        checked.heads,
        sum(size <= checked.entries for size in known_heads),
        tally.entries,
        len(expected),
        sum(amount > 0 for amount in tally.credits.values()),
        tally.balance,
    )


def heads_in(path: Path) -> list[SignedHead]:
    """Read the signed heads of a verified ledger file."""
    with path.open("rb") as file:
        return [SignedHead.from_json(row[:-1].decode()) for row in file if row.startswith(b'{"head":')]


def proof_in(path: Path, sequence: int, head: SignedHead | None) -> EntryProof:
    """Prove an entry of a ledger file under the file's last head."""
    hashes: list[str] = []
    matches: list[Entry] = []

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        hashes.append(entry.hash)
        if entry.sequence == sequence:
            matches.append(entry)

    verify_file(path, None, visit)
    if not matches or head is None:
        raise GymError(ErrorCode.NOT_FOUND, f"{path} has no entry {sequence}")
    path_up = Tree(hashes).inclusion(sequence - 1, head.size) if sequence < head.size else []
    return EntryProof(matches[0], head, tuple(path_up))


def _receipts(home: Home, server: str, key: bytes) -> list[tuple[int, str]]:
    """Verify the receipts, and return the sequence number and hash of the entry in each."""
    entries = []
    for receipt in kept_receipts(home, server):
        if "proof" in receipt:
            entry = check_receipt(receipt, key).entry
            entries.append((entry.sequence, entry.hash))
    return entries


def proved_rounds(home: Home, server: str) -> dict[int, list[str]]:
    """List the kinds of ledger entries that receipts prove, by round."""
    kinds: dict[int, list[str]] = {}
    for receipt in kept_receipts(home, server):
        if "proof" in receipt:
            entry = receipt["proof"]["entry"]
            server_round = entry["body"].get("server_round")
            if isinstance(server_round, int):
                kinds.setdefault(server_round, []).append(str(entry["kind"]))
    return kinds


def rewards_table(report: dict[str, Any]) -> TextTable:
    """Create the table of rounds, newest first, with the balance and the reputation."""
    title = f"{report['contributor']} at {report['server']}: {counted(report['balance'], 'credit')}"
    if report.get("held"):
        title += f", {report['held']} of them held"
    if isinstance(owed := report.get("owed"), int) and owed:
        title += f", {owed} to be withheld from later pay"
    if report.get("is_new") is True and any(row.get("score") is not None for row in report["rounds"]):
        title += ", scores are paid from your second merged update on"
    if report.get("reputation") is not None:
        title += f", reputation {report['reputation']:.3f}"
    columns = ("round", "update", "verdict", "score", "credit", "reputation", "receipts")
    table = TextTable(*columns, title=title)
    for row in report["rounds"]:
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
