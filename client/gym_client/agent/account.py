"""A contributor's account on a hub: receipts, verdicts, balance and residuals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gym_client.agent.region import RegionalHub
from gym_client.agent.residuals import MAX_WAITING, Residuals
from gym_client.agent.tasks import TaskFolder
from gym_client.audits.evidence import keep_evidence
from gym_client.display import Display
from gym_client.hub.backoff import Retry, may_pass
from gym_client.hub.replies import parse_account, parse_receipt, parse_verdicts
from gym_client.hub.traffic import Traffic
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.identity.pins import left_in_words
from gym_client.ledger.receipts import Receipts
from gym_client.privacy.secure_round import forget
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, with_error
from gym_fed.trust.wire.v1 import hub_pb2 as pb


class Account:
    """The contributor's account on one hub.

    Args:
        home: The home that stores receipts and residuals.
        client: Client of the hub.
        display: Displays verdicts and the balance.
        traffic: Counter of transferred bytes.
        region: The regional hub that created the updates; it gets a copy of their receipts.

    Attributes:
        receipts: Receipts of this run, oldest first.
        balance: Balance in credits as last reported by the hub; None before the first report.
    """

    def __init__(
        self,
        home: Home,
        client: HubClient,
        display: Display,
        traffic: Traffic | None = None,
        region: RegionalHub | None = None,
    ) -> None:
        self._home, self._region = home, region
        self._client = client
        self._display = display
        self._traffic = traffic or Traffic(home, client.pin.server)
        self._receipts = Receipts(home, client)
        self.receipts: list[dict[str, Any]] = []
        self.balance: int | None = None
        self._spent: object = None

    @contextmanager
    def until_left(self, retrying: Retry) -> Iterator[None]:
        """Run the block; if the account has left the hub, report that instead of raising the block's error.

        Args:
            retrying: Retries the call that asks the hub whether the account has left.

        Raises:
            GymError: Any other error from the block.
        """
        try:
            yield
        except GymError as error:
            if error.code is not ErrorCode.UNAUTHENTICATED or not retrying(self._client.note_leaving):
                raise
            self._display.busy("")
            self._display.report("left", left_in_words(self._client.pin), contributor=self._client.pin.left)

    def last_word(self) -> None:
        """Fetch the final verdicts and the balance; skipped if the hub is unreachable or fails."""
        try:
            account = self._client.call("Account", pb.AccountRequest())
        except GymError as error:
            if not may_pass(error):
                raise
            self.balance = None
            text = f"the last verdict and the balance could not be fetched: {error.message}"
            self._display.report("away", text, error=error.to_dict())
        else:
            self.take(account)

    def keep_receipt(self, message_id: str, group: str, text: str) -> None:
        """Store the receipt of a submitted reply, delete the task's folder and stage its residual until the verdict.

        Raises:
            GymError: ``SIGNATURE_INVALID`` for a receipt that the hub's ledger key did not sign.
        """
        receipt = parse_receipt(text)
        self._receipts.check(receipt)
        server = self._client.pin.server
        if self._region is not None:
            self._region.keep_receipt(receipt)
        record = {**receipt, "server": server, "task": message_id, "group": group}
        self._home.append_receipt({**record, **self._traffic.task.to_dict()})
        folder = TaskFolder(self._home.task_folder(message_id))
        verdict, update = str(receipt.get("verdict", "")), str(receipt.get("update", ""))
        if verdict == "admitted" and update:
            dropped = Residuals(self._home, server).stage(folder.residual_path, update, folder.moments_path)
            self._report_dropped(dropped)
            keep_evidence(self._home, folder, update)
        folder.drop()
        self.receipts.append(receipt)
        reason = f": {receipt['reason']}" if receipt.get("reason") else ""
        update_text = f" update {update[:12]}" if update else ""
        self._display.report("receipt", f"receipt: {verdict}{update_text}{reason}", **receipt)

    def _report_dropped(self, updates: list[str]) -> None:
        if updates:
            text = (
                f"the hub has not judged {counted(MAX_WAITING, 'update')} since update {updates[-1][:12]}: "
                "its encoding error and moments are deleted"
            )
            self._display.report("dropped", text, updates=updates)

    def take(self, account: pb.AccountReply) -> list[dict[str, Any]]:
        """Settle residuals according to the verdicts; display new verdicts and the balance.

        Returns:
            The hub's verdicts on this contributor's updates, newest first.
        """
        verdicts: list[dict[str, Any]] = parse_verdicts(account.verdicts_json)
        worth = parse_account(account.rewards_json)
        scored = _scored(worth)
        settled = Residuals(self._home, self._client.pin.server).settle(verdicts)
        forget(self._home, self._client.pin.server, verdicts)
        for reported in reversed(verdicts):
            if reported.get("update") in settled:
                why = f": {reported['reason']}" if reported.get("reason") else ""
                fields = dict(reported)
                if (measured := scored.get(str(reported["update"]))) is not None:
                    why += f", contribution {with_error(*measured)} nats"
                    fields |= {"score": measured[0], "error": measured[1]}
                text = f"verdict: {reported['verdict']} update {str(reported['update'])[:12]}{why}"
                self._display.report("verdict", text, **fields)
        self._receipts.fetch(verdicts)
        self._report_spent(worth.get("privacy"))
        if account.balance != self.balance:
            self.balance = account.balance
            self._display.report(
                "balance", f"balance: {counted(account.balance, 'credit')}", balance=account.balance
            )
        return verdicts

    def _report_spent(self, spent: Mapping[str, float] | None) -> None:
        """Display how much of the hub's privacy budget is spent for this contributor, if that has changed."""
        if spent and spent != self._spent:
            self._spent = spent
            self._display.report("hub-privacy", spent_in_words(spent), **spent)


def spent_in_words(spent: Mapping[str, Any]) -> str:
    """Describe ``privacy`` of a parsed account, which is not empty."""
    return (
        f"privacy on the hub: epsilon {spent['epsilon']:.3g} is spent on your updates of "
        f"{counted(spent['rounds'], 'round')} (delta {spent['target_delta']:g})"
    )


def _scored(worth: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return the score and standard error of every measured update, by update id."""
    rows = worth.get("rounds", ())
    return {row["update"]: (row["score"], row.get("error")) for row in rows if row.get("score") is not None}
