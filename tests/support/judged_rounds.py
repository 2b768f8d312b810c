"""Rounds of a hub without a network: updates are put where admission leaves them, and the round is merged."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rewards.settlements import Settlement, write_settlements
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.merging import merge_round
from gym_server.rounds.round_store import MERGING, Round
from gym_server.store.tables import contributions, credits, reputations, rounds, updates
from sqlalchemy import select, update
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce

DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
SIGNS = CodecPolicy(codec="bitdelta", error_feedback=False)

Delta = dict[str, Tensor]


def put_admitted(
    fed: Federation,
    model: HubModel,
    path: Path,
    contributor: str,
    server_round: int,
    norm: float | None = 1.0,
    received_at: float | None = None,
    **facts: Any,
) -> str:
    """Put a file where admission leaves an update that nobody signed; returns its id."""
    issued, expires = lifetime(time.time())
    manifest = UpdateManifest(
        contributor=contributor,
        server=fed.server,
        task=f"task-{server_round}-{contributor}",
        server_round=server_round,
        base_digest=model.digest,
        delta_sha256=fed.store.put_file(path),
        delta_bytes=path.stat().st_size,
        nonce=new_nonce(),
        issued_at_seconds=issued,
        expires_at_seconds=expires,
        **{"num_examples": 1, **facts},
    )
    with fed.database.transaction() as tx:
        tx.execute(
            updates.insert().values(
                update_id=manifest.digest,
                contributor=contributor,
                server_round=server_round,
                message_id=manifest.task,
                manifest=manifest.model_dump_json(),
                signature=b"",
                nonce=manifest.nonce,
                delta_sha256=manifest.delta_sha256,
                delta_bytes=manifest.delta_bytes,
                norm=norm,
                verdict="admitted",
                ledger_sequence=1,
                received_at=time.time() if received_at is None else received_at,
            )
        )
    return manifest.digest


class Judged:
    """A hub in ``folder`` that merges what it is given."""

    def __init__(self, folder: Path, base: Path, **changes: Any) -> None:
        init_hub(folder, HubChoices(str(base), "judged", "open"))
        path = folder / "gym-server.yaml"
        values = yaml.safe_load(path.read_text())
        values["soup"] = {"aggregator": "mean", "num_malicious_nodes": 0}
        values["gate"] = {"screen_updates": False}
        values["rounds"]["min_contributors"] = 1
        for key, value in changes.items():
            values[key] = {**values.get(key, {}), **value}
        path.write_text(yaml.safe_dump(values))
        self.fed = Federation.open(folder)
        fed = self.fed
        self.model = HubModel(fed.base, fed.config.base_model, fed.store, fed.config.gate, fed.folder)

    def know(self, contributors: Collection[str]) -> None:
        """Settle the first pay of contributors, as after a comparison: their scores are paid at once."""
        with self.fed.database.transaction() as tx:
            write_settlements(tx, dict.fromkeys(contributors, Settlement(None)))

    def put(
        self,
        path: Path,
        contributor: str,
        server_round: int,
        received_at: float,
        examples: int,
        publish_name: bool = False,
    ) -> str:
        """A file as an admitted update; returns its id."""
        facts = {"num_examples": examples, "publish_name": publish_name}
        return put_admitted(
            self.fed, self.model, path, contributor, server_round, received_at=received_at, **facts
        )

    def encode(self, delta: Delta, codec: CodecPolicy) -> Path:
        before = model_tensors(self.model.model)
        path = self.fed.folder / "staging" / f"update-{new_nonce()}"
        tuned = {name: tensor + delta[name] for name, tensor in before.items()}
        encode_delta(tuned, before, codec, path, self.model.spec)
        return path

    def round(
        self,
        sent: Mapping[str, Delta | Path | tuple[Delta, CodecPolicy]],
        examples: Mapping[str, int] | None = None,
        named: Collection[str] = (),
        **options: Any,
    ) -> dict[str, dict[str, Any]]:
        """Merge a round of one update a contributor, received in this order; ``named`` agree to be named.

        Returns:
            For each contributor ``verdict``, ``reason``, ``score``, ``credit``, ``reputation``.
        """
        number = self.fed.round_store.open_next().server_round
        self.model.follow(self.fed.round_store.soups())
        ids = {}
        for order, (who, what) in enumerate(sent.items()):
            delta, codec = what if isinstance(what, tuple) else (what, DENSE)
            path = delta if isinstance(delta, Path) else self.encode(delta, codec)
            claimed = (examples or {}).get(who, 1)
            ids[who] = self.put(path, who, number, time.time() + order, claimed, who in named)
        with self.fed.database.transaction() as tx:
            row = update(rounds).where(rounds.c.server_round == number)
            tx.execute(row.values(state=MERGING, merging=json.dumps(sorted(ids.values()))))
        self.merge(number, sorted(ids.values()), **options)
        return {who: self.found(number, who, update_id) for who, update_id in ids.items()}

    def merge(self, number: int, ids: Sequence[str], **options: Any) -> None:
        current = Round(number, MERGING, None, self.fed.round_store.head().height, list(ids), "")
        merge_round(self.fed.state, self.fed.config, self.fed.keys, self.model, current, **options)

    def found(self, number: int, who: str, update_id: str) -> dict[str, Any]:
        with self.fed.database.reading() as tx:
            row = tx.execute(select(updates).where(updates.c.update_id == update_id)).one()
            part = tx.execute(select(contributions).where(contributions.c.update_id == update_id)).first()
            where = (credits.c.server_round == number) & (credits.c.contributor == who)
            return {
                "verdict": row.verdict,
                "reason": row.reason,
                "score": part.score if part else None,
                "similarity": part.similarity if part else None,
                "reputation": part.reputation if part else None,
                "credit": int(tx.scalar(select(credits.c.amount).where(where)) or 0),
            }

    def reputations(self) -> dict[str, float]:
        with self.fed.database.reading() as tx:
            return {row.contributor: row.value for row in tx.execute(select(reputations))}

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry.body for entry in self.fed.ledger.entries() if entry.kind == kind]

    def trained(
        self,
        text: str,
        seed: int = 0,
        steps: int = 4,
        learning_rate: float = 2e-3,
        rows: Sequence[dict[str, Any]] | None = None,
    ) -> Delta:
        """Train on a contributor's rows, by default about ``text``, and return the change; seeds choose the batches."""
        from gym_fed.data.encoding import encode_rows

        rows = rows or [
            {
                "messages": [
                    {"role": "user", "content": f"{text} {i}"},
                    {"role": "assistant", "content": text * 2},
                ]
            }
            for i in range(8)
        ]
        encoded = encode_rows(self.model.tokenizer, rows, max_length=64)
        ids = [torch.tensor(row["input_ids"]) for row in encoded]
        generator = torch.Generator().manual_seed(seed)
        with self.model.borrowed() as before:
            optimizer = torch.optim.AdamW(self.model.model.parameters(), lr=learning_rate, weight_decay=0.0)
            for _ in range(steps):
                loss = torch.zeros(())
                for i in torch.randint(len(ids), (6,), generator=generator).tolist():
                    loss = loss + self.model.model(input_ids=ids[i][None], labels=ids[i][None]).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            after = model_tensors(self.model.model)
            return {name: (after[name] - tensor).detach().clone() for name, tensor in before.items()}

    def close(self) -> None:
        self.fed.close()
