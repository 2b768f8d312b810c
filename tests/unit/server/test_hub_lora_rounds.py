"""LoRA rounds at the hub: the soup is factors, replays to the same bytes, and nobody can make it larger for all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.privacy.merge import trained_tensors
from gym_server.rounds.downloads import Downloads
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.merging import merge_round
from gym_server.rounds.replay import replay
from gym_server.rounds.round_store import MERGING, Round
from gym_server.store.tables import rounds, updates
from sqlalchemy import select, update

from gym_fed.config.hub.task import TaskSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from tests.support.judged_rounds import put_admitted

RANK = 2


pytestmark = pytest.mark.usefixtures("updates_without_admission")


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    folder = tmp_path / "hub"
    init_hub(folder, HubChoices(str(tiny_base), "lora", "open"))
    path = folder / "gym-server.yaml"
    values = yaml.safe_load(path.read_text())
    values["recipe"].update(finetuning="lora", lora={"r": RANK})
    values["rounds"]["min_contributors"] = 1
    values["soup"].update(aggregator="mean", num_malicious_nodes=0)
    values["gate"] = {"screen_updates": False}
    path.write_text(yaml.safe_dump(values))
    with Federation.open(folder) as federation:
        yield federation


@pytest.fixture
def model(hub: Federation) -> HubModel:
    return HubModel(hub.base, hub.config.base_model, hub.store, hub.config.gate, hub.folder)


def factors(hub: Federation, rank: int, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, hub.base.shapes[name][1], generator=generator),
            torch.randn(hub.base.shapes[name][0], rank, generator=generator) / 100,
            1.0,
        )
        for name in trained_tensors(hub.config.recipe, hub.base)
    }


def send(hub: Federation, model: HubModel, number: int, who: str, kind: str) -> str:
    """An admitted update, before the merge; its id."""
    path = hub.folder / "staging" / who
    if kind == "dense":
        name = trained_tensors(hub.config.recipe, hub.base)[0]
        delta = torch.full(hub.base.shapes[name], 1e-3)
        write_delta(path, [DeltaEntry.of(name, delta, "dense", dtype="float32")], model.spec)
    else:
        rank = RANK + (kind == "large")
        lora_delta(factors(hub, rank, number * 10 + ord(who[0])), path, model.spec)
    with DeltaFile.open(path, model.spec) as delta:
        norm = delta.norm()
    update_id = put_admitted(hub, model, path, who, number, norm)
    path.unlink()
    return update_id


def merge_next(hub: Federation, model: HubModel, kinds: dict[str, str]) -> int:
    number = hub.round_store.open_next().server_round
    model.follow(hub.round_store.soups())
    ids = sorted(send(hub, model, number, who, kind) for who, kind in kinds.items())
    with hub.database.transaction() as tx:
        row = update(rounds).where(rounds.c.server_round == number)
        tx.execute(row.values(state=MERGING, merging=json.dumps(ids)))
    spec = TaskSpec(
        server=hub.server,
        server_round=number,
        base_model="tiny",
        base_digest=hub.base.digest,
        version_digest=model.digest,
        soups=hub.round_store.soups(),
        recipe=hub.config.recipe,
        max_update_bytes=1 << 20,
        deadline_seconds=time.time() + 60,
    )
    merge_round(
        hub.state,
        hub.config,
        hub.keys,
        model,
        Round(number, MERGING, spec, hub.round_store.head().height, ids, ""),
    )
    return number


def test_the_template_sends_lora_soups_back_as_factors_that_replay(hub: Federation, model: HubModel) -> None:
    assert hub.config.soup.codec.codec == "as-merged"
    numbers = [merge_next(hub, model, {"ann": "good", "bob": "good"}) for _ in range(2)]
    soups = hub.round_store.soups()
    assert len(soups) == 2
    spec = hub.base
    for soup in soups:
        with DeltaFile.open(hub.store.local_path(soup.sha256)) as found:
            large = {found.record(n).codec for n in found.names if min(spec.shapes[n]) > 8}
            assert large == {"lora"}
    for number in numbers:
        assert replay(hub.state, number)["replayed"] == soups[number - 1].sha256
    assert Downloads(hub.live_config, hub.base, hub.round_store).announced(2, 0) == (
        sum(s.size_bytes for s in soups),
        soups[-1].size_bytes,
    )


def test_before_the_first_soup_a_hub_announces_what_its_quorum_takes_and_the_soup_is_no_larger(
    hub: Federation, model: HubModel
) -> None:
    downloads = Downloads(hub.live_config, hub.base, hub.round_store)
    joining, announced = downloads.announced(0, 2)
    assert joining == 0
    assert downloads.announced(0, 1)[1] < announced, "of the members that exist"
    merge_next(hub, model, {"ann": "good", "bob": "good"})
    (soup,) = hub.round_store.soups()
    assert soup.size_bytes <= announced <= soup.size_bytes + 64


@pytest.mark.parametrize(("kind", "reason"), [("dense", "codec dense"), ("large", "rank 3")])
def test_an_update_that_is_no_factors_of_the_rounds_rank_does_not_reach_the_soup(
    hub: Federation, model: HubModel, kind: str, reason: str
) -> None:
    number = merge_next(hub, model, {"ann": "good", "bob": "good", "eve": kind})
    with hub.database.reading() as tx:
        rows = {r.contributor: r for r in tx.execute(select(updates)).all() if r.server_round == number}
    assert {who: row.verdict for who, row in rows.items()} == {
        "ann": "merged",
        "bob": "merged",
        "eve": "rejected",
    }
    assert reason in rows["eve"].reason
    with DeltaFile.open(hub.store.local_path(hub.round_store.soups()[0].sha256)) as soup:
        assert max(int(soup.record(n).params.get("rank", 0)) for n in soup.names) == 2 * RANK
