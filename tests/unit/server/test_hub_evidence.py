"""A hub with clean rows judges lengths once, records what it found, and replays it bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_server.rounds.evidence import LengthEvidence
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.recipes import check_soup
from gym_server.rounds.replay import replay
from gym_server.store.tables import rounds
from pydantic import ValidationError
from sqlalchemy import select

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors
from gym_fed.soup.aggregators.byzantine_evidence import LENGTHS
from tests.support.judged_rounds import DENSE, SIGNS, Delta, Judged
from tests.support.private_configs import NOTHING_COMPARED

EVIDENCE = {"aggregator": "byzantine_evidence", "num_malicious_nodes": 1}
ROOT = {"data": "root.jsonl"}


pytestmark = pytest.mark.usefixtures("updates_without_admission")


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[Callable[..., Judged]]:
    opened: list[Judged] = []

    def make(root: bool = True, **changes: Any) -> Judged:
        folder = tmp_path / f"hub{len(opened)}"
        sections = {"soup": EVIDENCE, "rounds": {"min_contributors": 3}, **({"root": ROOT} if root else {})}
        recipe = {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 32}
        opened.append(Judged(folder, tiny_base, **{"recipe": recipe, **sections, **changes}))
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"moon {i}"},
                    {"role": "assistant", "content": "moon moon"},
                ]
            }
            for i in range(6)
        ]
        (folder / "root.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def noise(hub: Judged, seed: int, size: float = 1e-3) -> Delta:
    """An update like nobody else's."""
    generator = torch.Generator().manual_seed(seed)
    tensors = model_tensors(hub.model.model)
    return {name: size * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def length(delta: Delta) -> float:
    return float(torch.cat([tensor.flatten() for tensor in delta.values()]).norm())


def contributions(hub: Judged, eve: float = -0.6) -> dict[str, Delta]:
    """Three short updates without direction, and two four times as long: towards the rows, and by default away."""
    learnt = hub.trained("moon ")
    short = [noise(hub, seed) for seed in range(3)]
    lengths = length(short[0]) / length(learnt)

    def long(direction: float, seed: int) -> Delta:
        cover = noise(hub, seed)
        return {name: 4 * (0.8 * cover[name] + direction * lengths * learnt[name]) for name in cover}

    return {**dict(zip(("ann", "bob", "cat"), short, strict=True)), "dan": long(0.6, 3), "eve": long(eve, 4)}


@pytest.mark.parametrize("codec", [DENSE, SIGNS], ids=["float", "packed"])
def test_a_useful_long_update_keeps_its_length_a_harmful_one_does_not_and_a_replay_needs_no_model(
    hub: Callable[..., Judged], codec: CodecPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = hub()
    before = {name: tensor.clone() for name, tensor in model_tensors(here.model.model).items()}
    sent = contributions(here)
    here.round({who: (delta, codec) for who, delta in sent.items()})
    assert all(torch.equal(t, before[name]) for name, t in model_tensors(here.model.model).items())
    (version,) = here.entries("version")
    who = {body["update"]: body["contributor"] for body in here.entries("verdict")}
    verdicts = {who[update]: kept for update, kept in version["evidence"]["verdicts"].items()}
    assert verdicts == {"ann": False, "bob": False, "cat": False, "dan": True, "eve": False}
    assert len(version["evidence"]["rows"]) == 32
    assert version["evidence"]["length"] in LENGTHS
    assert version["root"] is not None

    def none(*_: Any, **__: Any) -> float:
        raise AssertionError("a replay runs no model")

    monkeypatch.setattr(HubModel, "loss_on", none)
    (here.fed.folder / "root.jsonl").unlink()
    assert replay(here.fed.state, 1)["replayed"] == version["soup"]


@pytest.mark.parametrize("change", [{"verdicts": False}, {"length": 0.9}])
def test_a_replay_with_other_evidence_gives_another_soup(
    hub: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    here = hub()
    here.round(contributions(here))

    def recorded(fields: dict[str, Any], updates: list[str]) -> LengthEvidence:
        verdicts = dict.fromkeys(updates, False) if "verdicts" in change else fields["verdicts"]
        return LengthEvidence(fields["rows"], verdicts, change.get("length", fields["length"]))

    monkeypatch.setattr(LengthEvidence, "recorded", recorded)
    with pytest.raises(GymError, match="the ledger records soup") as found:
        replay(here.fed.state, 1)
    assert found.value.code is ErrorCode.STATE_CORRUPT


@pytest.mark.parametrize(
    "change",
    [{"length": 0.01}, {"length": "0.5"}, {"verdicts": {}}, {"rows": None}, {"more": 1}, {"length": None}],
)
def test_recorded_evidence_that_no_hub_measures_is_refused(change: dict[str, Any]) -> None:
    fields = {"rows": "0" * 32, "verdicts": {"a": True}, "length": 0.5}
    assert LengthEvidence.recorded(fields, ["a"]).length == 0.5
    with pytest.raises(GymError, match="the evidence of the version") as refused:
        LengthEvidence.recorded(fields | change, ["a"])
    assert refused.value.code is ErrorCode.STATE_CORRUPT


def test_without_rows_the_budget_decides_and_a_replay_is_bit_exact(hub: Callable[..., Judged]) -> None:
    here = hub(root=False)
    here.round(contributions(here))
    (version,) = here.entries("version")
    assert "evidence" not in version
    assert replay(here.fed.state, 1)["replayed"] == version["soup"]


def test_rows_that_cannot_be_read_end_the_round_with_the_reason(hub: Callable[..., Judged]) -> None:
    here = hub()
    (here.fed.folder / "root.jsonl").write_text("{}")
    here.round(contributions(here))
    assert not here.entries("version")
    with here.fed.database.reading() as tx:
        assert "no known format" in str(tx.scalar(select(rounds.c.reason)))


def test_rows_select_the_rule_unless_one_is_named() -> None:
    def rule(**values: Any) -> str:
        return ServerConfig.model_validate(values).soup.aggregator

    assert rule(root=ROOT) == "byzantine_evidence"
    assert rule(root=ROOT, soup={"num_malicious_nodes": 1}) == "byzantine_evidence"
    assert rule(root=ROOT, soup={"aggregator": "fltrust_caf"}) == "fltrust_caf"
    assert rule() == "mean"


def test_the_rule_is_refused_with_privacy_and_secure_aggregation_and_with_pre_aggregators() -> None:
    private = {**NOTHING_COMPARED, "soup": {"aggregator": "byzantine_evidence"}}
    privacy = {"privacy": {"noise_multiplier": 1.0, "clipping_norm": 1.0, "epsilon": 8.0}}
    with pytest.raises(ValidationError, match=r"byzantine_evidence.*root_gate") as refused:
        ServerConfig.model_validate({**private, **privacy, "root": ROOT})
    assert "soup.aggregator" in str(refused.value)
    secure = {"secure_aggregation": {"threshold": 3, "step_norm": 1.0}}
    with pytest.raises(
        ValidationError, match=r"'byzantine_evidence' is not a function of the sum; use majority_vote or mean"
    ):
        ServerConfig.model_validate({**private, **secure})
    config = ServerConfig.model_validate(
        {"root": ROOT, "soup": {"aggregator": "byzantine_evidence", "pre_aggregators": ["nnm"]}}
    )
    with pytest.raises(GymError, match="pre_aggregators nnm change the updates"):
        check_soup(config)


@pytest.mark.parametrize(("together", "kept"), [(0.8, True), (1.2, False), (float("nan"), False)])
def test_lengths_that_are_useful_alone_are_kept_only_if_they_are_useful_together(
    hub: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch, together: float, kept: bool
) -> None:
    here = hub()
    # Of the soup, with either excess, and with both; then of the soup at every length.
    losses = iter([1.0, 0.9, 0.9, together, *([0.9] * len(LENGTHS))])
    monkeypatch.setattr(HubModel, "loss_on", lambda *_: next(losses))
    here.round(contributions(here, eve=0.6))
    (version,) = here.entries("version")
    who = {body["update"]: body["contributor"] for body in here.entries("verdict")}
    verdicts = {who[update]: found for update, found in version["evidence"]["verdicts"].items()}
    assert verdicts == {"ann": False, "bob": False, "cat": False, "dan": kept, "eve": kept}


@pytest.mark.parametrize(
    ("losses", "length"),
    [([1.0, 0.9, 0.8, 0.7, 0.9], 0.35), ([1.0] * 5, 1.0), ([float("nan"), float("inf"), 0.9, 0.9, 1.0], 0.5)],
)
def test_the_soup_gets_the_length_of_the_lowest_loss_and_the_model_is_as_before(
    hub: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch, losses: list[float], length: float
) -> None:
    here = hub()
    before = {name: tensor.clone() for name, tensor in model_tensors(here.model.model).items()}
    sent = {who: noise(here, seed) for seed, who in enumerate(("ann", "bob", "cat"))}
    moved, said = list[float](), iter([1.0, *losses])

    def loss_on(model: HubModel, rows: object) -> float:
        now = model_tensors(model.model)
        moved.append(math.sqrt(sum(float((now[name] - before[name]).square().sum()) for name in before)))
        return next(said)

    monkeypatch.setattr(HubModel, "loss_on", loss_on)
    here.round(sent)
    (version,) = here.entries("version")
    assert version["evidence"]["length"] == length
    assert [size / moved[0] for size in moved[1:]] == pytest.approx(LENGTHS, rel=1e-3)
    assert replay(here.fed.state, 1)["replayed"] == version["soup"]
