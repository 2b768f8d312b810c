"""Verdicts at the door of a private round: the ledger holds a seal, and only the contributor can open it.

A verdict that names its contributor says when somebody sent an update, and after whom. In a private round the entry of
kind ``sealed`` holds a digest instead, over the update's manifest and the verdict. The manifest has 128 secret random
bits, so that nobody can guess what is sealed; whoever holds manifest and receipt can prove it.
"""

from __future__ import annotations

from gym_fed.identity.canonical import canonical_digest

SEALED = "sealed"
"""Kind of the entry: ``{"server_round": N, "seal": HEX}``."""


def seal(manifest_json: str, verdict: str, code: str, reason: str) -> str:
    """What the ledger says of a verdict at the door.

    Args:
        manifest_json: The signed text of the update's manifest.
        verdict: ``admitted`` or ``refused``.
        code: Of the refusal; empty for an admission.
        reason: Of the refusal, in full; empty for an admission.

    Returns:
        Hex sha256.
    """
    content = {"manifest": manifest_json, "verdict": verdict, "code": code, "reason": reason}
    return canonical_digest({"gym-seal-1": content})
