"""A key that is revoked between admission and merge: its update does not enter, and earns nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from gym_server.store.tables import updates
from sqlalchemy import select, update

from gym_fed.delta import model_tensors
from gym_fed.identity.keys import SigningKey
from gym_fed.identity.manifest import UpdateManifest
from tests.support.judged_rounds import Judged


class Signed(Judged):
    """Updates are signed by the keys of ``signers``; that of ``robbed`` is revoked right afterwards."""

    signers: dict[str, SigningKey]
    robbed: str

    def put(self, path: Path, contributor: str, server_round: int, received_at: float, examples: int) -> str:
        update_id = super().put(path, contributor, server_round, received_at, examples)
        with self.fed.database.transaction() as tx:
            row = tx.execute(select(updates).where(updates.c.update_id == update_id)).one()
            signature = UpdateManifest.parse(row.manifest).sign(self.signers[contributor])
            where = update(updates).where(updates.c.update_id == update_id)
            tx.execute(where.values(signature=signature))
        if contributor == self.robbed:
            self.fed.keys.revoke_as_coordinator(contributor, "stolen")
        return update_id


def test_an_admitted_update_of_a_key_revoked_since_is_rejected_at_the_merge(
    tmp_path: Path, tiny_base: Path
) -> None:
    hub = Signed(tmp_path / "hub", tiny_base, admission={"norm_ratio": None})
    keys = [SigningKey.generate() for _ in range(2)]
    for key in keys:
        signed = {"enrol": "n", "invite": "", "server": hub.fed.server}
        hub.fed.accounts.enrol(key.public_key, "n", "", key.sign(signed))
    hub.signers = {key.contributor: key for key in keys}
    honest, hub.robbed = (key.contributor for key in keys)
    torch.manual_seed(0)
    before = model_tensors(hub.model.model)
    deltas = {who: {k: 1e-3 * torch.randn_like(v) for k, v in before.items()} for who in hub.signers}
    found = hub.round(deltas)
    hub.close()
    assert (found[honest]["verdict"], found[honest]["credit"]) == ("merged", 1000)
    assert (found[hub.robbed]["verdict"], found[hub.robbed]["credit"]) == ("rejected", 0)
    assert found[hub.robbed]["reason"] == "the key was revoked before the merge"
