"""What a failed task means for the agent, by the code of its error."""

from __future__ import annotations

from gym_fed.core.errors import ErrorCode

GONE = (ErrorCode.LEASE_LOST, ErrorCode.STALE, ErrorCode.NOT_FOUND, ErrorCode.REPLAYED)
"""The hub has no use for the reply any more."""
FATAL = (
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED,
    ErrorCode.KEY_REVOKED,
    ErrorCode.KEY_LOCKED,
    ErrorCode.SERVER_KEY_CHANGED,
    ErrorCode.SIGNATURE_INVALID,
    ErrorCode.STATE_CORRUPT,
    ErrorCode.LEDGER_FORKED,
    ErrorCode.HUB_RESTORED,
)
"""No further task will go better."""
TASKS_OWN = (
    ErrorCode.POLICY_REFUSED,
    ErrorCode.TOO_LARGE,
    ErrorCode.HASH_MISMATCH,
    ErrorCode.DELTA_INVALID,
    ErrorCode.UPDATE_REFUSED,
    ErrorCode.TASKS_DIFFER,
    ErrorCode.INTERNAL,
)
"""Failures of one task, after which another may succeed; any other needs the contributor first."""
