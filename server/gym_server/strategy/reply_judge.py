"""Judge the untrusted replies of a round."""

from __future__ import annotations

import logging

from flwr.app import Message, RecordDict
from sqlalchemy.exc import SQLAlchemyError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.federation import Federation
from gym_server.rounds.admission import UpdateSubmission
from gym_server.rounds.payload import Payloads
from gym_server.store.room import raise_if_full
from gym_server.store.unavailable import StoreUnavailable
from gym_server.strategy.grid import LOST
from gym_server.strategy.tasks import update_in

log = logging.getLogger("gym_server")

STATE_ERRORS = frozenset({ErrorCode.STATE_CORRUPT, ErrorCode.STATE_LOCKED, ErrorCode.LEDGER_FORKED})
"""Errors of the hub's own state, which replies cannot cause."""


class ReplyJudge:
    """Judges the replies to one hub's tasks.

    Args:
        federation: The opened hub.
        payloads: How deltas are sent on the grid in use.
    """

    def __init__(self, federation: Federation, payloads: Payloads) -> None:
        self._rounds, self._queue = federation.round_store, federation.queue
        self._accounts, self._admission = federation.accounts, federation.admission
        self._payloads = payloads

    def outcome(self, server_round: int, reply: Message) -> str:
        """Return the outcome of a task: ``replied``, ``failed`` or ``lost``. The content of a reply never raises.

        Only failures of this machine's disk, database or ledger raise.
        """
        outcome, problem = "replied", ""
        if reply.has_error():
            outcome, problem = "lost" if reply.error.code == LOST else "failed", f": {reply.error.reason}"
        else:
            try:
                self._judge(server_round, reply.metadata.reply_to_message_id, reply.content)
            except (OSError, SQLAlchemyError, StoreUnavailable):
                raise
            except Exception as error:  # untrusted content, whose parsers raise no fixed set of exceptions
                raise_if_full(error)
                if isinstance(error, GymError) and error.code in STATE_ERRORS:
                    raise
                outcome, problem = "failed", f" refused: {error}"
        if problem:
            log.info("round %d: %s%s", server_round, self._queue.name_of(reply.metadata.src_node_id), problem)
        return outcome

    def _judge(self, server_round: int, message_id: str, content: RecordDict) -> None:
        manifest, signature, key = update_in(content, self._payloads)
        accounts = self._accounts
        if self._payloads.by_reference:
            # It was judged at submission, with the key that the account had at that time.
            known = self._rounds.judged(UpdateManifest.parse(manifest).digest)
            if known is not None and known.verdict != "refused" and known.message_id == message_id:
                return
            contributor, signer = accounts.keys.owner(key), key
        else:
            contributor = accounts.get_or_create(key)
            signer = accounts.public_key(contributor)
        submission = UpdateSubmission(contributor, signer, message_id, server_round, manifest, signature)
        receipt = self._admission.judge(submission, lambda tx, receipt: None)
        if receipt.verdict == "refused":
            raise GymError(ErrorCode(receipt.code), receipt.reason)
