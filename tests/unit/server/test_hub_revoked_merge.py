"""Keys and transfers at a round's end: a revoked key's update stays out, and what is due settles with the commit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from gym_server.store.tables import updates
from sqlalchemy import select, update

from gym_fed.delta.base import model_tensors
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.identity.statements import TransferOrder
from tests.support.enrolment import enrol
from tests.support.judged_rounds import Judged


class Signed(Judged):
    """Updates are signed by the keys of ``signers``; that of ``robbed`` is revoked right afterwards."""

    signers: dict[str, SigningKey]
    robbed: str = ""

    def put(self, path: Path, contributor: str, *details: Any, **options: Any) -> str:
        update_id = super().put(path, contributor, *details, **options)
        with self.fed.database.transaction() as tx:
            row = tx.execute(select(updates).where(updates.c.update_id == update_id)).one()
            signature = UpdateManifest.parse(row.manifest).sign(self.signers[contributor])
            where = update(updates).where(updates.c.update_id == update_id)
            tx.execute(where.values(signature=signature))
        if contributor == self.robbed:
            self.fed.keys.revoke_as_coordinator(contributor, "stolen")
        return update_id


def enrolled(hub: Signed) -> list[str]:
    keys = [SigningKey.generate() for _ in range(2)]
    for key in keys:
        enrol(hub.fed, key, "n")
    hub.signers = {key.contributor: key for key in keys}
    return [key.contributor for key in keys]


def deltas(hub: Signed, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    before = model_tensors(hub.model.model)
    return {who: {k: 1e-3 * torch.randn_like(v) for k, v in before.items()} for who in hub.signers}


def test_a_transfer_that_is_due_settles_in_the_commit_of_the_next_round(
    tmp_path: Path, tiny_base: Path
) -> None:
    hub = Signed(tmp_path / "hub", tiny_base, rewards={"hold_seconds": 0})
    sender, recipient = enrolled(hub)
    hub.round(deltas(hub, 1))
    order = TransferOrder(
        sender=sender,
        to=recipient,
        amount=200,
        server=hub.fed.server,
        tls=hub.fed.fingerprint,
        issued_at=int(time.time()),
    )
    signature = order.sign(hub.signers[sender])
    assert hub.fed.payouts.request(sender, order.to_json(), signature)["status"] == "pending"
    hub.round(deltas(hub, 2))
    kinds = [entry.kind for entry in hub.fed.ledger.entries()]
    with hub.fed.database.reading() as tx:
        balances = [hub.fed.payouts.balance_of(tx, who)["balance"] for who in (sender, recipient)]
    hub.close()
    assert kinds.count("transfer-settled") == 1
    assert kinds.index("transfer-settled") > kinds.index("transfer")
    assert balances == [800, 1200]


def test_an_admitted_update_of_a_key_revoked_since_is_rejected_at_the_merge(
    tmp_path: Path, tiny_base: Path
) -> None:
    hub = Signed(tmp_path / "hub", tiny_base, admission={"norm_ratio": None})
    honest, hub.robbed = enrolled(hub)
    found = hub.round(deltas(hub, 0))
    hub.close()
    assert (found[honest]["verdict"], found[honest]["credit"]) == ("merged", 1000)
    assert (found[hub.robbed]["verdict"], found[hub.robbed]["credit"]) == ("rejected", 0)
    assert found[hub.robbed]["reason"] == "the key was revoked before the merge"
