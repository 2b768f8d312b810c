"""Reputation is earned by rounds, fades with absence, is lost by cheating, and may weigh in the soup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gym_server.rewards.reputations import rewards_of
from gym_server.rewards.scores import ScoringStopped
from gym_server.rewards.split import split
from gym_server.rounds.merging import merge_round
from gym_server.rounds.recipes import check_soup
from gym_server.rounds.replay import replay
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.strategy.tasks import new_task

from gym_fed.config.hub.credits import ReputationConfig, RewardsConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import GymError
from gym_fed.delta.base import model_tensors
from gym_fed.soup.credit import Outcome, Reputation, after, before
from gym_fed.trust.identity.keys import SigningKey
from tests.support.judged_rounds import DENSE, Delta, Judged
from tests.support.measured import measured_round
from tests.support.private_configs import NOTHING_COMPARED

pytestmark = pytest.mark.usefixtures("updates_without_admission")


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[Callable[..., Judged]]:
    opened: list[Judged] = []

    def make(**changes: Any) -> Judged:
        opened.append(Judged(tmp_path / f"hub{len(opened)}", tiny_base, **changes))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def moved(hub: Judged, seed: int, size: float = 1e-3) -> Delta:
    """An update like nobody else's."""
    generator = torch.Generator().manual_seed(seed)
    tensors = model_tensors(hub.model.model)
    return {name: size * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def test_reputation_rises_by_rounds_fades_with_absence_and_falls_with_rejections() -> None:
    value = 0.0
    for expected in (0.2, 0.36, 0.488):
        value = after(value, Outcome.POSITIVE, up=0.2, rejected=0.5, cheating=0.0)
        assert value == expected
    assert after(value, Outcome.NOTHING, 0.2, 0.5, 0.0) == value
    assert after(value, Outcome.REJECTED, 0.2, 0.5, 0.0) == 0.244
    assert after(value, Outcome.CHEATING, 0.2, 0.5, 0.1) == 0.0488
    assert before(Reputation(0.5, height=3), 4, absence=0.9) == 0.5
    assert before(Reputation(0.5, height=3), 6, absence=0.9) == 0.405


def test_ten_new_keys_weigh_no_more_than_one_contributor_with_reputation(
    hub: Callable[..., Judged],
) -> None:
    here = hub()
    old = ("ann", "bob")
    here.round({who: moved(here, i) for i, who in enumerate(old)})
    flock = [f"new{i}" for i in range(6)]
    found = here.round({who: moved(here, 10 + i) for i, who in enumerate([*old, *flock])})
    assert [found[who]["credit"] for who in old] == [385, 385]
    assert {found[who]["credit"] for who in flock} == {38, 39}
    again = here.round({who: moved(here, 30 + i) for i, who in enumerate([*old, *flock])})
    assert 0 < again["new0"]["credit"] < again["ann"]["credit"]
    open_to_all = hub(rewards={"participation_ramp": False})
    open_to_all.round({"ann": moved(open_to_all, 1)})
    found = open_to_all.round({who: moved(open_to_all, 50 + i) for i, who in enumerate(["ann", *flock[:3]])})
    assert {one["credit"] for one in found.values()} == {250}


def test_a_cheat_loses_its_reputation_and_the_absent_some_of_theirs(hub: Callable[..., Judged]) -> None:
    here = hub()
    work = {who: moved(here, i) for i, who in enumerate(("ann", "bob", "cat"))}
    here.round(work)
    copy = {name: 2 * tensor for name, tensor in work["ann"].items()}
    found = here.round({"ann": moved(here, 7), "bob": copy})
    assert (found["ann"]["reputation"], found["bob"]["reputation"]) == (0.36, 0.0)
    with here.fed.database.reading() as tx:
        reported = {who: rewards_of(tx, who, here.fed.config.rewards) for who in work}
    assert reported["cat"]["reputation"] == pytest.approx(0.2 * 0.98)
    assert [one["reputation"] for one in reported["bob"]["rounds"]] == [0.0, 0.2]
    assert reported["bob"]["rounds"][0]["verdict"] == "rejected"
    assert reported["ann"]["rounds"][0]["credit"] == 1000
    assert here.fed.ledger.verify()["reputations"] == 3
    with here.fed.database.transaction() as tx:
        from gym_server.store.tables import reputations

        tx.execute(reputations.update().where(reputations.c.contributor == "bob").values(value=1.0))
    with pytest.raises(GymError, match=r"reputations"):
        here.fed.ledger.verify()


def test_reputations_weigh_the_soup_and_a_replay_takes_those_of_then(hub: Callable[..., Judged]) -> None:
    here = hub(soup={"aggregator": "weighted_mean", "weighting": "reputation", "reputation_floor": 0.1})
    here.round({"ann": moved(here, 1)})
    here.round({"ann": moved(here, 2), "bob": moved(here, 3)})
    versions = here.entries("version")
    assert sorted(versions[1]["weights"].values()) == [0.1, 0.2]
    here.round({"ann": moved(here, 4), "bob": moved(here, 5)})
    assert sorted(here.entries("version")[2]["weights"].values()) == [0.2, 0.36]
    assert replay(here.fed.state, 2)["replayed"] == versions[1]["soup"]


def test_reputation_as_a_weight_is_refused_where_nobody_would_look_at_it(hub: Callable[..., Judged]) -> None:
    with pytest.raises(ValueError, match="reputation_floor is required"):
        SoupRecipe(weighting="reputation")
    with pytest.raises(GymError, match="needs a hub, which keeps reputations"):
        SoupRecipe(weighting="reputation", reputation_floor=0.1).weights([1])
    here = hub(soup={"weighting": "reputation", "reputation_floor": 0.1, "aggregator": "multi_krum"})
    with pytest.raises(GymError, match="weighting: reputation has no effect on aggregator 'multi_krum'"):
        check_soup(here.fed.config)


def test_a_hub_that_is_stopped_while_it_scores_commits_nothing_and_scores_again(
    hub: Callable[..., Judged], tmp_path: Path
) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"text": "ann ann ann"}\n')
    gate = {"heldout": str(heldout), "screen_updates": False, "max_loss_increase": 9.0}
    here = hub(gate=gate, rewards={"score": "shapley"})
    sent = {who: moved(here, i) for i, who in enumerate(("ann", "bob"))}
    asked = []
    with pytest.raises(ScoringStopped):
        here.round(sent, should_stop=lambda: asked.append(1) is None and len(asked) == 3)
    assert here.reputations() == {}
    assert not here.entries("contribution")
    with here.fed.database.reading() as tx:
        from gym_server.store.tables import updates
        from sqlalchemy import select

        ids = sorted(tx.scalars(select(updates.c.update_id)).all())
    here.merge(1, ids)
    (reported,) = here.entries("contribution")
    assert (reported["method"], set(reported["scores"])) == ("shapley", set(ids))
    assert reported["evaluations"] >= 3


def test_if_nobody_gave_anything_nothing_is_paid_and_the_pool_waits() -> None:
    config, nobody = RewardsConfig(score="estimate"), {"ann": 0.0, "bob": 0.0}
    found = split(config, nobody, measured_round({"ann": 0.0, "bob": -1.0}), carried=500)
    assert (found.credits, set(found.earning), found.left) == ({"ann": 0, "bob": 0}, set(), 1500)


def test_the_pool_is_split_by_score_and_by_work() -> None:
    config = RewardsConfig(score="estimate", quality_weight=0.5)
    reputations = {"ann": 0.3, "bob": 0.1, "cat": 0.2}
    found = split(config, reputations, measured_round({"ann": 0.1, "bob": 0.3, "cat": -0.001}))
    assert found.credits == {"ann": 125 + 250, "bob": 375 + 83, "cat": 167}
    assert (found.left, found.earning) == (0, {"ann", "bob"})
    lucky = split(config, {"ann": 0.3, "bob": 0.3}, measured_round({"ann": 0.1, "bob": 0.3}, chance=0.06))
    assert lucky.credits == {"ann": 250, "bob": 500 + 250}
    assert lucky.earning == {"bob"}


def test_a_round_pays_its_price_for_what_it_gained_and_the_next_one_gets_the_rest_of_the_pool() -> None:
    config, new = RewardsConfig(score="estimate"), {"ann": 0.0, "bob": 0.0}
    first = split(config, new, measured_round({"ann": 0.03, "bob": 0.01}))
    assert first.credits == {"ann": 240 + 40, "bob": 80 + 40}
    assert first.left == 600
    later = measured_round({"ann": 0.0, "bob": 0.1}, None, 0.0, first.running_scores, first.run, first.shared)
    second = split(config, new, later, carried=first.left)
    assert second.credits == {"ann": 100, "bob": 800 + 100}
    assert second.left == 600


@pytest.mark.parametrize("score", ["participation", "estimate"])
def test_every_credit_of_the_pool_is_paid_or_waits_whatever_the_rule(score: str) -> None:
    config, people = RewardsConfig(score=score), {"ann": 0.0, "bob": 0.5}
    measured = measured_round({"ann": 0.03, "bob": -0.01}) if config.measures else None
    found = split(config, people, measured, carried=700)
    assert sum(found.credits.values()) + found.left == config.pool + 700
    assert found.left >= 700 or config.measures, "nothing was measured that could have earned what waits"


def test_harm_is_made_good_before_anything_more_is_earned() -> None:
    config, new = RewardsConfig(score="estimate", quality_weight=1.0), {"ann": 0.0, "bob": 0.0}
    first = split(config, new, measured_round({"ann": -0.02, "bob": 0.05}))
    assert first.credits == {"ann": 0, "bob": 300}, "the round gained 0.03"
    second = split(
        config,
        new,
        measured_round({"ann": 0.03, "bob": 0.0}, running_scores=first.running_scores, run=first.run),
    )
    assert second.credits == {"ann": 100, "bob": 200}


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"quality_weight": 0.5}, "participation measures no quality"),
        ({"score": "estimate", "quality_weight": 0}, "use score: participation"),
        ({"score": "estimate", "quality_weight": 0.5, "participation_weight": 0.6}, "do not sum to 1"),
        ({"score": "improvement", "score_options": {"seed": 1}}, "score 'improvement' has no options"),
        ({"score": "gtg"}, "set gate.heldout"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(rewards: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConfig.model_validate({"rewards": rewards})


def test_the_configs_of_the_guide_are_what_it_says() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text()
    rewards, soup = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.S | re.M))
    config = ServerConfig.model_validate(rewards | {"soup": {**soup["soup"], "num_malicious_nodes": 0}})
    assert config.rewards.weights == (0.8, pytest.approx(0.2))
    assert config.rewards == RewardsConfig(score="estimate", score_options={"points": 1}, quality_weight=0.8)
    assert config.soup.reputation_floor == 0.1


def test_a_round_pays_by_the_terms_of_its_task_whatever_the_config_says_by_then(
    hub: Callable[..., Judged],
) -> None:
    here = hub(rewards={"pool": 700})
    number = here.fed.round_store.open_next().server_round
    spec = new_task(here.fed.state, here.fed.config, here.fed.max_update_bytes, number)
    assert spec.pay == here.fed.config.rewards.terms()
    here.fed.round_store.start_collecting(number, spec)
    here.put(here.encode(moved(here, 1), DENSE), "ann", number, 1.0, 1)
    current = here.fed.round_store.start_merging(number)
    less = here.fed.config.rewards.model_copy(update={"pool": 10})
    here.fed.config = here.fed.config.model_copy(update={"rewards": less})
    merge_round(here.fed.state, here.fed.config, here.fed.keys, here.model, current)
    assert [one["amount"] for one in here.entries("credit")] == [700]
    assert (
        new_task(here.fed.state, here.fed.config, here.fed.max_update_bytes, number + 1).pay == less.terms()
    )
    announced = json.loads(Hub(here.fed, Wakeups())._status().recipe_json)
    assert announced["pay"]["pool"] == 10
    assert announced["rounds_left"] == here.fed.config.rounds.num_rounds - 1


def test_similarity_and_reputation_count_as_the_task_announced_them(hub: Callable[..., Judged]) -> None:
    here = hub()
    fed, work = here.fed, moved(here, 1)
    number = fed.round_store.open_next().server_round
    spec = new_task(fed.state, fed.config, fed.max_update_bytes, number)
    fed.round_store.start_collecting(number, spec)
    sent = {"ann": work, "bob": {name: 2 * tensor for name, tensor in work.items()}, "cat": moved(here, 2)}
    for order, (who, delta) in enumerate(sent.items()):
        here.put(here.encode(delta, DENSE), who, number, 1.0 + order, 1)
    current = fed.round_store.start_merging(number)
    later = fed.config.rewards.model_copy(
        update={
            "similarity_threshold": None,
            "together_threshold": None,
            "min_norm_ratio": 1.0,
            "reputation": ReputationConfig(up=0.9),
        }
    )
    merge_round(fed.state, fed.config.model_copy(update={"rewards": later}), fed.keys, here.model, current)
    assert [one["verdict"] for one in here.entries("verdict")].count("duplicate") == 1
    assert sorted(one["amount"] for one in here.entries("credit")) == [250, 250, 500]
    assert here.reputations() == {"ann": 0.1, "bob": 0.1, "cat": 0.2}


@pytest.mark.parametrize("section", ["privacy", "secure_aggregation"])
def test_nothing_looks_into_updates_that_are_promised_to_be_hidden(section: str) -> None:
    said = r"{similarity_threshold: null}.*{together_threshold: null}.*{min_norm_ratio: 0}"
    assert re.search(said, " ".join(map(str, RewardsConfig().looks_into_updates(section))))
    first = next(RewardsConfig(score="estimate").looks_into_updates(section))
    assert f"needs single updates, which {section} hides" in str(first)
    off: dict[str, Any] = NOTHING_COMPARED["rewards"]
    assert not list(RewardsConfig(**off).looks_into_updates(section))
    config = {"privacy": {"epsilon": 4.0}} if section == "privacy" else {section: {}}
    with pytest.raises(ValueError, match=r"rewards: {stale_threshold: null}"):
        ServerConfig.model_validate(config)


def test_an_account_reports_scores_credits_and_reputation(hub: Callable[..., Judged]) -> None:
    here = hub()
    ann = here.fed.accounts.get_or_create(SigningKey.generate().public_key)
    here.round({ann: moved(here, 1), "bob": moved(here, 2)})
    reported = json.loads(Hub(here.fed, Wakeups())._account(ann).rewards_json)
    assert (reported["reputation"], reported["balance"]) == (0.2, 500)
    (line,) = reported["rounds"]
    assert (line["server_round"], line["verdict"], line["method"]) == (1, "merged", "participation")
    assert (line["score"], line["credit"], line["reputation"]) == (None, 500, 0.2)
    assert abs(line["similarity"]) < 0.2
