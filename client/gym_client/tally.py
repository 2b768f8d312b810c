"""What a ledger says of one contributor, added up entry by entry, to be held against what the hub tells."""

from __future__ import annotations

from typing import Any

from gym_fed.ledger.entries import Entry
from gym_fed.ledger.seals import SEALED, seal


class Tally:
    """Shown every entry of a ledger, it has the contributor's standing.

    Args:
        contributor: Whose.

    Attributes:
        credits: Earned, by round.
        royalties: Earned by the use of versions, by usage id.
        verdicts: The last word on every update.
        seals: Of verdicts at the door of private rounds, everybody's.
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

    def lies(self, balance: int, verdicts: list[dict[str, Any]]) -> list[str]:
        """What the hub tells, and its ledger does not say.

        Args:
            balance: As told.
            verdicts: Of ``AccountReply.verdicts_json``, parsed.
        """
        found = []
        if balance != self.balance:
            found.append(f"the hub tells a balance of {balance}, its ledger adds up to {self.balance}")
        for told in verdicts:
            update, server_round = str(told["update"]), int(told["server_round"])
            says = self.verdicts.get(update) or self._opened(told)
            if says != told["verdict"]:
                found.append(f"update {update[:12]}: the hub tells {told['verdict']}, its ledger says {says}")
            elif told["verdict"] == "merged" and told["credit"] != self.credits.get(server_round, 0):
                found.append(
                    f"round {server_round}: the hub tells {told['credit']} credits, its ledger says "
                    f"{self.credits.get(server_round, 0)}"
                )
        return found

    def _opened(self, told: dict[str, Any]) -> str | None:
        """The verdict at the door that the hub reports, if the ledger has its seal."""
        text = [str(told.get(key, "")) for key in ("manifest", "verdict", "code", "reason")]
        return text[1] if text[0] and seal(*text) in self.seals else None

    def _transfer(self, kind: str, body: dict[str, Any]) -> None:
        sends, gets = (body.get(key) == self.contributor for key in ("from", "to"))
        if kind == "transfer" and sends:
            self.pending[body["transfer"]] = body["amount"]
        elif kind in ("transfer-settled", "transfer-cancelled"):
            self.pending.pop(body["transfer"], None)
            if kind == "transfer-settled":
                self.moved += body["amount"] * (int(gets) - int(sends))
