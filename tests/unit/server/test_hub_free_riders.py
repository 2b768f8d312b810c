"""Nobody earns by what nobody worked for: zeros, noise, copies in any dress, old work, many keys of one contributor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gym_server.cli.show import rewards_shown
from gym_server.rewards import earlier_work
from gym_server.rewards.earlier_work import EarlierWork, stale_work
from gym_server.rewards.free_riders import _zeros
from gym_server.rewards.reputations import rewards_of
from gym_server.rewards.running_scores import OF_ALL, RUN, SHARED, basis_of, running_scores_on
from gym_server.rounds.replay import rescore
from gym_server.rounds.round_store import MERGING
from gym_server.store.tables import contributions, rounds, updates

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.screening import compare, leaders
from tests.support.judged_rounds import DENSE, SIGNS, Delta, Judged

POOL = 1000
PEOPLE = ("ann", "bob", "cat")


pytestmark = pytest.mark.usefixtures("updates_without_admission")


def scaled(delta: Delta) -> Delta:
    return {name: 0.3 * (1 + i % 3) * tensor for i, (name, tensor) in enumerate(delta.items())}


def jittered(delta: Delta, share: float = 0.1) -> Delta:
    torch.manual_seed(1)
    return {name: t + share * t.std() * torch.randn_like(t) for name, t in delta.items()}


def flipped(delta: Delta, share: float = 0.02) -> Delta:
    torch.manual_seed(2)
    return {name: torch.where(torch.rand_like(t) < share, -t, t) for name, t in delta.items()}


def noise_like(delta: Delta, seed: int = 3) -> Delta:
    torch.manual_seed(seed)
    return {name: tensor.std() * torch.randn_like(tensor) for name, tensor in delta.items()}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> dict[str, Delta]:
    """What three contributors' training gives, ``ann``'s once more with other batches, and of two more rounds."""
    hub = Judged(tmp_path_factory.mktemp("honest") / "hub", tiny_base)
    found = {name: hub.trained(name, steps=12) for name in PEOPLE}
    found["ann again"] = hub.trained("ann", seed=1, steps=12)
    hub.close()
    return found


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[Callable[..., Judged]]:
    opened: list[Judged] = []

    def make(measured: bool = False, **changes: Any) -> Judged:
        folder = tmp_path / f"hub{len(opened)}"
        if measured:
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": f"{n} {i}"},
                        {"role": "assistant", "content": n * 2},
                    ]
                }
                for n in PEOPLE
                for i in range(8, 12)
            ]
            heldout = tmp_path / "heldout.jsonl"
            heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
            alone = changes.get("rewards", {}).get("score") == "improvement"
            gate = {"heldout": str(heldout), "max_length": 64, "screen_updates": alone}
            changes["gate"] = gate | changes.get("gate", {})
        opened.append(Judged(folder, tiny_base, **changes))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_zeros_are_rejected_and_copies_in_any_dress_weigh_once_and_share_the_pay(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    people = {name: honest[name] for name in PEOPLE}
    alone = hub()
    alone.round(people)
    crowd = hub()
    found = crowd.round(
        {
            **people,
            "zero": {name: torch.zeros_like(tensor) for name, tensor in honest["ann"].items()},
            "next to zero": {name: 1e-6 * tensor for name, tensor in honest["ann"].items()},
            "scaled": scaled(honest["ann"]),
            "jittered": jittered(honest["bob"]),
            "flipped": flipped(honest["cat"]),
            "re-encoded": (honest["ann"], SIGNS),
            "re-encoded and jittered": (jittered(honest["bob"], 0.05), SIGNS),
            "same data, other batches": honest["ann again"],
        }
    )
    same_as = {
        "ann": ("scaled", "re-encoded", "same data, other batches"),
        "bob": ("jittered", "re-encoded and jittered"),
        "cat": ("flipped",),
    }
    for name, copies in same_as.items():
        assert found[name]["verdict"] == "merged"
        assert {found[copy]["verdict"] for copy in copies} == {"duplicate"}
        credits = [found[who]["credit"] for who in (name, *copies)]
        assert sum(credits) in (333, 334)
        assert max(credits) - min(credits) <= 1
        shares = {found[who]["reputation"] for who in (name, *copies)}
        assert shares == {round(0.2 / len(credits), 6)}, "together they rise as one"
    for name in ("zero", "next to zero"):
        one = found[name]
        assert (one["verdict"], one["credit"], one["reputation"]) == ("rejected", 0, 0.0), (name, one)
        assert "negligible" in one["reason"]
    assert "by ann: it counts once" in found["scaled"]["reason"]
    assert crowd.fed.round_store.head().digest == alone.fed.round_store.head().digest
    assert len(crowd.entries("contribution")[0]["clusters"]) == 3
    assert crowd.fed.ledger.verify()["reputations"] == 11


def test_old_work_sent_again_is_stale_but_new_work_on_the_same_data_is_not(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub()
    here.round({name: honest[name] for name in PEOPLE})
    here.model.follow(here.fed.round_store.soups())
    (soup,) = here.fed.round_store.soups()
    again = here.encode({n: t / 2 for n, t in decoded(here, soup.sha256).items()}, DENSE)
    found = here.round(
        {
            "ann": (scaled(honest["ann"]), SIGNS),
            "dan": scaled(honest["bob"]),
            "eve": again,
            "bob": here.trained("bob", seed=5, steps=12),
        }
    )
    assert "stale: resends update" in found["ann"]["reason"]
    assert "by bob of round 1" in found["dan"]["reason"]
    assert "stale: resends the soup of round 1" in found["eve"]["reason"]
    assert {who for who, one in found.items() if one["credit"]} == {"bob"}
    assert found["ann"]["reputation"] == 0.2, "similarity to one's own work is no proof of cheating"
    assert found["dan"]["reputation"] == found["eve"]["reputation"] == 0.0
    assert found["bob"]["reputation"] > 0.2


def decoded(here: Judged, sha256: str) -> Delta:
    with DeltaFile.open(here.fed.store.local_path(sha256)) as soup:
        return {name: soup.decode(name).clone() for name in soup.names}


def test_work_of_an_aborted_round_may_come_again(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(rounds={"min_contributors": 1}, soup={"num_malicious_nodes": 0})
    number = here.fed.round_store.open_next().server_round
    here.put(here.encode(honest["ann"], DENSE), "ann", number, 1.0, 1)
    here.fed.round_store.abort(number, "as if nobody else had come")
    assert here.round({"ann": jittered(honest["ann"], 0.01)})["ann"]["verdict"] == "merged"


@pytest.mark.parametrize("score", ["estimate", "shapley"])
def test_noise_and_harm_earn_nothing_by_score_and_get_only_what_everybody_merged_gets(
    hub: Callable[..., Judged], honest: dict[str, Delta], score: str
) -> None:
    here = hub(measured=True, rewards={"score": score, "quality_weight": 0.6})
    here.know([*PEOPLE, "noise", "harm"])
    found = here.round(
        {
            **{name: honest[name] for name in PEOPLE},
            "noise": noise_like(honest["ann"]),
            "harm": {name: -tensor.roll(1, 0) for name, tensor in honest["bob"].items()},
        }
    )
    (entry,) = here.entries("contribution")
    by_score = {who: one["earned"] for who, one in entry["running_scores"].items()}
    assert by_score["noise"] == by_score["harm"] == 0
    assert all(by_score[name] > 0 for name in PEOPLE)
    parts = {who: one["credit"] - by_score[who] for who, one in found.items()}
    assert max(parts.values()) - min(parts.values()) <= 1, parts
    assert min(parts.values()) > 0
    paid = sum(one["credit"] for one in found.values())
    assert paid + entry["left"] == POOL
    assert entry["gain"]["certain"] < entry["gain"]["gained"]
    assert paid <= entry["gain"]["certain"] * here.fed.config.rewards.credits_per_nat
    assert found["noise"]["reputation"] == found["harm"]["reputation"] == 0.0
    assert rescore(here.fed.state, here.fed.config, 1)["same"]
    shown = {
        one["contributor"]: one
        for one in rewards_shown(here.fed.config, here.fed.database, here.fed.payouts)["contributors"]
    }
    assert shown["ann"]["rounds"][0]["score"] == found["ann"]["score"] > 0


def test_noise_that_is_lucky_by_itself_earns_nothing_by_score(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    generator = torch.Generator().manual_seed(6)
    lucky = {
        name: torch.randn(t.shape, generator=generator) * t.norm() / t.numel() ** 0.5
        for name, t in honest["cat"].items()
    }
    here = hub(measured=True, rewards={"score": "improvement"})
    here.know(["ann", "bob", "noise"])
    found = here.round({"ann": honest["ann"], "bob": honest["bob"], "noise": lucky})
    assert found["noise"]["score"] > 0.05 * found["ann"]["score"] > 0.0
    (entry,) = here.entries("contribution")
    assert (found["noise"]["verdict"], entry["running_scores"]["noise"]["earned"]) == ("merged", 0)
    assert found["noise"]["reputation"] == 0.0 < found["ann"]["reputation"]
    assert set(entry["errors"]) == set(entry["scores"])
    assert min(entry["errors"].values()) > 0.0


@pytest.mark.parametrize("score", ["shapley", "estimate"])
def test_every_verdict_on_a_measured_update_has_its_score_with_the_error(
    hub: Callable[..., Judged], honest: dict[str, Delta], score: str
) -> None:
    here = hub(measured=True, rewards={"score": score})
    found = here.round({"ann": honest["ann"], "bob": honest["bob"]})
    verdicts = {one["contributor"]: one for one in here.entries("verdict")}
    assert {who: one["score"] for who, one in verdicts.items()} == {
        who: one["score"] for who, one in found.items()
    }
    assert min(one["error"] for one in verdicts.values()) > 0.0
    assert here.fed.ledger.verify()["scores of verdicts"] == 2
    with here.fed.database.transaction() as tx:
        mine = contributions.c.contributor == "ann"
        tx.execute(contributions.update().where(mine).values(error=None))
    with pytest.raises(GymError, match="scores"):
        here.fed.ledger.verify()


def test_a_round_whose_gain_is_within_the_error_of_few_rows_pays_nothing_and_leaves_the_pool(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(measured=True, rewards={"score": "improvement"}, gate={"max_loss_increase": 9.0})
    weak = {
        name: {n: 1e-3 * t for n, t in noise_like(honest[name], seed).items()}
        for seed, name in enumerate(PEOPLE)
    }
    found = here.round(weak)
    assert {one["verdict"] for one in found.values()} == {"merged"}
    assert {one["credit"] for one in found.values()} == {0}
    assert here.entries("contribution")[0]["left"] == POOL
    found = here.round({name: honest[name] for name in PEOPLE})
    (_, entry) = here.entries("contribution")
    assert POOL < sum(one["credit"] for one in found.values()) == 2 * POOL - entry["left"]
    assert here.fed.ledger.verify()["running_scores"] == 2 * (3 + len(OF_ALL)), (
        "three people, as of each version"
    )


def test_a_change_of_the_price_prices_no_earlier_gain_again(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(measured=True, rewards={"score": "estimate"})
    here.know(PEOPLE)
    here.round({name: honest[name] for name in PEOPLE})
    here.model.follow(here.fed.round_store.soups())
    pay = here.fed.config.rewards.model_copy(update={"quality_weight": 0.2})
    here.fed.config = here.fed.config.model_copy(update={"rewards": pay})
    found = here.round({name: near(honest[name], 0.3, i) for i, name in enumerate(PEOPLE)})
    first, second = here.entries("contribution")
    assert first["basis"] != second["basis"]
    assert second["running_scores"][RUN]["brought"] == pytest.approx(second["gain"]["gained"], abs=2e-6)
    for name in PEOPLE:
        assert second["running_scores"][name]["brought"] == pytest.approx(found[name]["score"], abs=2e-6)
    assert here.fed.ledger.verify()["running_scores"] == 2 * (3 + len(OF_ALL))


def test_credits_that_wait_are_still_there_after_rounds_that_measure_nothing(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(measured=True, rewards={"score": "estimate"})
    paid = sum(one["credit"] for one in here.round({"ann": noise_like(honest["ann"])}).values())
    waiting = POOL - paid
    assert here.entries("contribution")[0]["left"] == waiting > 0
    measured = here.fed.config
    unmeasured = measured.rewards.model_copy(update={"score": "participation"})
    here.fed.config = measured.model_copy(update={"rewards": unmeasured})
    found = here.round({name: honest[name] for name in PEOPLE[1:]})
    assert sum(one["credit"] for one in found.values()) == POOL
    assert here.entries("contribution")[1]["left"] == waiting
    here.fed.config = measured
    found = here.round({name: honest[name] for name in PEOPLE[:1]})
    paid = sum(one["credit"] for one in found.values())
    assert paid + here.entries("contribution")[2]["left"] == POOL + waiting


@pytest.mark.parametrize("keys", [2, 3, 4])
def test_many_keys_of_one_contributor_earn_what_one_would(
    hub: Callable[..., Judged], honest: dict[str, Delta], keys: int
) -> None:
    dresses = [scaled(honest["ann"]), honest["ann again"], jittered(honest["ann"])]
    rewards = {"score": "estimate", "participation_ramp": False}
    people = {name: honest[name] for name in PEOPLE}
    more = {f"ann{i}": dress for i, dress in enumerate(dresses[: keys - 1])}
    hubs = [hub(measured=True, rewards=rewards) for _ in range(2)]
    for here in hubs:
        here.know([*people, *more])
    single, many = hubs[0].round(people), hubs[1].round({**people, **more})
    for name in PEOPLE:
        together = sum(one["credit"] for who, one in many.items() if who.startswith(name))
        assert together == pytest.approx(single[name]["credit"], abs=1)
        assert together > 0


def test_keys_that_put_noise_on_one_update_are_merged_and_paid_as_one(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    noisy = {}
    for i in range(3):
        torch.manual_seed(i)
        noise = {n: 0.6 * t.norm() / t.numel() ** 0.5 * torch.randn_like(t) for n, t in honest["ann"].items()}
        noisy[f"ann{i}"] = {name: tensor + noise[name] for name, tensor in honest["ann"].items()}
    here = hub()
    found = here.round({**noisy, "bob": honest["bob"], "cat": (honest["cat"], SIGNS)})
    assert {one["verdict"] for one in found.values()} == {"merged"}
    assert sum(found[who]["credit"] for who in noisy) in (333, 334)
    assert [len(group) for group in here.entries("contribution")[0]["together"]] == [3]
    assert [found[who]["reputation"] for who in ("ann0", "bob")] == [0.066667, 0.2]
    assert here.fed.ledger.verify()["reputations"] == 5


def test_a_hubs_first_round_pays_for_taking_part_and_its_scores_are_paid_with_those_of_the_second(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(measured=True, rewards={"score": "estimate"})
    people = {name: honest[name] for name in PEOPLE}
    first = here.round(people)
    pay, taking_part = here.fed.config.rewards, sum(one["credit"] for one in first.values())
    assert min(one["score"] for one in first.values()) > 0.0
    assert max(one["credit"] for one in first.values()) - min(one["credit"] for one in first.values()) <= 1
    with here.fed.database.reading() as tx:
        assert rewards_of(tx, "ann", here.fed.config.rewards)["is_new"]
    found = here.round({name: near(delta, 0.3, 1) for name, delta in people.items()})
    (entry, later) = here.entries("contribution")
    gained = entry["gain"]["certain"] * pay.credits_per_nat * pay.weights[1]
    assert 0 < taking_part == pytest.approx(min(gained, POOL * pay.weights[1]), abs=1)
    assert entry["running_scores"][SHARED]["earned"] == taking_part
    assert not any(entry["running_scores"][name]["earned"] for name in PEOPLE)
    paid = sum(one["credit"] for one in found.values())
    assert (entry["left"], later["left"]) == (POOL - taking_part, 2 * POOL - taking_part - paid)
    assert all(later["running_scores"][name]["earned"] > 0 for name in PEOPLE)
    both = later["gain"]["certain"] * pay.credits_per_nat * pay.weights[1]
    assert later["running_scores"][SHARED]["earned"] <= both + 1, "the first round's gain is not shared twice"
    with here.fed.database.reading() as tx:
        assert not rewards_of(tx, "ann", here.fed.config.rewards)["is_new"]


def test_a_round_with_one_contributor_pays_its_score_at_once(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(measured=True, rewards={"score": "estimate"})
    assert here.round({"bob": honest["bob"]})["bob"]["credit"] > 0
    assert here.entries("contribution")[0]["running_scores"]["bob"]["earned"] > 0
    with here.fed.database.reading() as tx:
        assert not rewards_of(tx, "bob", here.fed.config.rewards)["is_new"]


@pytest.mark.parametrize("missed", [0, 4], ids=["at once", "after more than stale_rounds"])
def test_keys_that_train_on_the_same_data_are_paid_as_one_from_their_second_round_on(
    hub: Callable[..., Judged], honest: dict[str, Delta], missed: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def direction(size: float) -> Delta:
        return {n: size * torch.randn(t.shape, generator=generator) for n, t in honest["ann"].items()}

    def update(*parts: Delta) -> Delta:
        return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}

    common, personal = direction(1e-4), {name: direction(1e-4) for name in PEOPLE}
    data = {**personal, "ann2": personal["ann"]}
    here = hub(rewards={"participation_ramp": False})
    rounds = []
    for _ in range(2):
        sent = {who: update(common, own, direction(1.5e-4)) for who, own in data.items()}
        rounds.append(here.round(sent))
        for _ in range(missed):
            here.fed.round_store.abort(here.fed.round_store.open_next().server_round, "nobody came")
    assert [one["credit"] for one in rounds[0].values()] == [250] * 4
    in_both = {who: sum(one[who]["credit"] for one in rounds) for who in data}
    assert in_both["ann"] + in_both["ann2"] in (583, 584), (
        "250 + 333: what one would have got with two others"
    )
    assert {in_both["bob"], in_both["cat"]} <= {708, 709}
    assert sum(in_both.values()) == 2 * POOL
    first, second = here.entries("contribution")
    assert [len(group) for group in second["together"]] == [2]
    assert first["settlements"] == {who: {"provisional": 250, "owed": 0} for who in data}
    assert second["settlements"] == {who: {"provisional": None, "owed": 0} for who in data}
    found = here.fed.ledger.verify()
    assert (found["reputations"], found["settlements"]) == (4, 4)


def test_what_is_claimed_of_examples_buys_neither_weight_nor_credit(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    people = {name: honest[name] for name in PEOPLE}
    modest, boastful = (
        hub(measured=True, rewards={"score": "estimate"}),
        hub(measured=True, rewards={"score": "estimate"}),
    )
    for here in (modest, boastful):
        here.know(people)
    outcomes = [modest.round(people), boastful.round(people, examples={"ann": 10**9})]
    assert outcomes[0]["ann"]["credit"] > 0
    assert {w: o["credit"] for w, o in outcomes[0].items()} == {
        w: o["credit"] for w, o in outcomes[1].items()
    }
    assert modest.fed.round_store.soups()[0].sha256 == boastful.fed.round_store.soups()[0].sha256


def test_two_people_with_the_same_rows_are_never_accused_and_the_rounds_go_on(
    hub: Callable[..., Judged],
) -> None:
    here = hub(
        soup={"aggregator": "byzantine_robust", "num_malicious_nodes": 1}, rounds={"min_contributors": 3}
    )
    for number in range(1, 4):
        here.model.follow(here.fed.round_store.soups())
        sent = {
            "ann": here.trained("ann", seed=number, steps=12),
            "ben": here.trained("ann", seed=100 + number, steps=12),
            "cat": here.trained("cat", seed=number, steps=12),
        }
        found = here.round(sent)
        current = here.fed.round_store.current()
        assert current is not None
        assert current.state == "committed", current.reason
        assert {one["verdict"] for one in found.values()} == {"merged"}, "the rule needs three votes"
        assert found["ann"]["credit"] == pytest.approx(found["ben"]["credit"], abs=1)
        both = found["ann"]["credit"] + found["ben"]["credit"]
        assert both == pytest.approx(found["cat"]["credit"], rel=0.05), "two share one part"
        assert min(one["reputation"] for one in found.values()) > 0.0


def test_rejected_and_aborted_work_is_no_evidence_against_anybody(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub()
    number = here.fed.round_store.open_next().server_round
    here.put(here.encode(scaled(honest["ann"]), DENSE), "mallory", number, 1.0, 1)
    here.fed.round_store.abort(number, "as if nobody else had come")
    found = here.round({"ann": honest["ann"], "bob": honest["bob"]})
    assert found["ann"]["verdict"] == "merged"
    assert found["ann"]["reputation"] > 0.0


@pytest.mark.parametrize("first", ["author", "copier"])
def test_a_copier_cannot_get_the_author_rejected_by_coming_first(
    hub: Callable[..., Judged], honest: dict[str, Delta], first: str
) -> None:
    here = hub()
    work = {"author": honest["ann"], "copier": jittered(honest["ann"])}
    order = sorted(work, key=lambda who: who != first)
    found = here.round({**{who: work[who] for who in order}, "bob": honest["bob"]})
    assert found[order[0]]["verdict"] == "merged"
    assert found[order[1]]["verdict"] == "duplicate"
    assert found["author"]["credit"] == pytest.approx(found["copier"]["credit"], abs=1)
    assert found["author"]["reputation"] > 0.0
    here.model.follow(here.fed.round_store.soups())
    later = here.round({"author": here.trained("ann", seed=9, steps=12), "bob": honest["cat"]})
    assert later["author"]["verdict"] == "merged", "the copy that was merged is no evidence"
    assert later["author"]["reputation"] > found["author"]["reputation"]


def test_an_update_is_examined_for_the_most_similar_earlier_work_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members who repeat their own work are like all earlier work of all others, round after round."""
    row = SimpleNamespace(update_id="u", contributor="ann", committed_at=9.0, received_at=9.0, manifest="")
    works = [
        EarlierWork(f"update {number}", frozenset({f"member {number}"}), False, "", "", 1.0)
        for number in range(600)
    ]
    similar = [(old, row, 0.9991 + 1e-6 * number) for number, old in enumerate(works)]
    examined: list[str] = []

    def explained_by_own_work(_state: Any, _row: Any, old: EarlierWork) -> float:
        examined.append(old.what)
        return 0.9999

    for name, value in (
        ("earlier_work", lambda *_: {}),
        ("_to_earlier", lambda *_: similar),
        ("_repeated_work", lambda *_: 0.0),
        ("_own_work_before", explained_by_own_work),
    ):
        monkeypatch.setattr(earlier_work, name, value)
    state: Any = SimpleNamespace(database=None, round_store=None, base=None, store=None)
    assert stale_work(state, ServerConfig(), [row], {}, 4) == {}
    assert examined == [f"update {number}" for number in range(599, 591, -1)]
    similar.append((works[0], row, 1.0))
    monkeypatch.setattr(earlier_work, "_is_independent", lambda *_: False)
    assert stale_work(state, ServerConfig(), [row], {}, 4)["u"].cheating, "an identical one comes first"


def near(delta: Delta, share: float, seed: int) -> Delta:
    generator = torch.Generator().manual_seed(seed)
    noise = {n: torch.randn(t.shape, generator=generator) for n, t in delta.items()}
    return {n: t + share * t.norm() / t.numel() ** 0.5 * noise[n] for n, t in delta.items()}


@pytest.mark.parametrize("author_repeats_itself", [True, False])
def test_merged_work_of_others_is_evidence_only_where_it_is_closer_than_honest_repetition(
    hub: Callable[..., Judged], honest: dict[str, Delta], author_repeats_itself: bool
) -> None:
    here = hub()
    here.round({"ann": honest["ann"], "bob": honest["bob"]})
    here.model.follow(here.fed.round_store.soups())
    again = {"ann": near(honest["ann"], 0.02, 1)} if author_repeats_itself else {}
    found = here.round({**again, "ben": near(honest["ann"], 0.025, 2), "bob": honest["cat"]})
    if author_repeats_itself:
        assert found["ann"]["verdict"] == "merged"
        assert found["ben"]["verdict"] == "duplicate", "as alike as the author's own two rounds"
        assert found["ben"]["reputation"] > 0.0
    else:
        assert "stale" in found["ben"]["reason"], "nothing else here is that alike"
        assert found["ben"]["reputation"] == 0.0


def test_a_copier_that_repeats_its_copy_does_not_raise_the_bar_that_it_is_measured_by(
    hub: Callable[..., Judged], honest: dict[str, Delta], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = hub(rewards={"similarity_threshold": None})
    # The first copy counts as own work if it was sent before the merge, which depends on the speed of this machine.
    monkeypatch.setattr(earlier_work, "_own_work_before", lambda *_: 0.0)
    copied = near(honest["ann"], 0.02, 1)
    here.round({"ann": honest["ann"], "ben": copied, "bob": honest["bob"]})
    here.model.follow(here.fed.round_store.soups())
    found = here.round({"ben": near(copied, 0.01, 2), "bob": honest["cat"]})
    assert "stale: resends update" in found["ben"]["reason"]
    assert "by ann of round 1" in found["ben"]["reason"]


def test_a_merged_copy_is_no_evidence_against_its_author_nor_a_friends_work_against_a_duplicate(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here, noise = hub(), iter(range(1, 99))

    def round_of(*who: str) -> dict[str, dict[str, Any]]:
        here.model.follow(here.fed.round_store.soups())
        work = {"ann": "ann", "copier": "ann", "friend": "ann", "bob": "bob"}
        share = {"copier": 0.012, "bob": 0.5}  # the author is steadier than its copier
        return here.round(
            {name: near(honest[work[name]], share.get(name, 0.01), next(noise)) for name in who}
        )

    round_of("ann", "friend", "bob")
    assert round_of("copier", "ann", "bob")["copier"]["verdict"] == "merged"
    for _ in range(4):
        found = round_of("ann", "bob")
        assert found["ann"]["verdict"] == "merged", found["ann"]["reason"]
        assert found["ann"]["reputation"] > 0.0
    found = round_of("friend", "bob")
    assert found["friend"]["verdict"] == "merged", "its duplicate of round 1 shows that the rows are its own"
    assert found["friend"]["reputation"] > 0.0


def test_a_rollback_ends_the_scores_of_the_abandoned_versions_and_keeps_their_credits(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(measured=True, rewards={"score": "estimate"})
    here.know(PEOPLE)
    first = here.round({name: honest[name] for name in PEOPLE})
    (abandoned,) = here.entries("contribution")
    assert abandoned["running_scores"][RUN]["brought"] > 0.0
    here.fed.steering.rollback(0)
    here.model.follow(here.fed.round_store.soups())
    found = here.round({name: near(honest[name], 0.1, i) for i, name in enumerate(PEOPLE[:2])})
    entry = here.entries("contribution")[1]
    scores, before = entry["running_scores"], abandoned["running_scores"]
    for name in PEOPLE[:2]:
        assert scores[name]["brought"] == pytest.approx(found[name]["score"], abs=2e-6), "only the new round"
        assert scores[name]["earned"] >= before[name]["earned"] > 0
    assert scores[RUN]["brought"] == pytest.approx(entry["gain"]["gained"], abs=2e-6)
    again = sum(scores[name]["earned"] - before[name]["earned"] for name in PEOPLE[:2])
    assert scores[RUN]["earned"] == again, "pay of abandoned rounds leaves the pay of others as it is"
    with here.fed.database.reading() as tx:
        basis = basis_of(here.model.heldout, here.fed.config.rewards)
        away = running_scores_on(tx, basis, 2, np.zeros(1))[PEOPLE[2]]
    assert (away.brought, away.earned) == (0.0, before[PEOPLE[2]]["earned"])
    paid = sum(one["credit"] for one in (*first.values(), *found.values()))
    assert paid + entry["left"] == 2 * POOL
    assert here.fed.ledger.verify()["running_scores"] == 3 + 2 + 2 * len(OF_ALL)


def test_a_bad_copy_that_the_screens_reject_takes_nobodys_place(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    here = hub(admission={"norm_ratio": 4.0})
    number = here.fed.round_store.open_next().server_round
    people = {"copier": {n: 1000 * t for n, t in honest["ann"].items()}, **{p: honest[p] for p in PEOPLE}}
    ids = {
        who: here.put(here.encode(delta, DENSE), who, number, float(order), 1)
        for order, (who, delta) in enumerate(people.items())
    }
    with here.fed.database.transaction() as tx:
        for who, update_id in ids.items():
            norm = 1000.0 if who == "copier" else 1.0
            tx.execute(updates.update().where(updates.c.update_id == update_id).values(norm=norm))
        row = rounds.update().where(rounds.c.server_round == number)
        tx.execute(row.values(state=MERGING, merging=json.dumps(sorted(ids.values()))))
    here.merge(number, sorted(ids.values()))
    found = {who: here.found(number, who, update_id) for who, update_id in ids.items()}
    assert found["copier"]["verdict"] == "rejected"
    assert {found[name]["verdict"] for name in PEOPLE} == {"merged"}


def test_without_a_threshold_copies_are_merged_and_paid(
    hub: Callable[..., Judged], honest: dict[str, Delta]
) -> None:
    off = {"similarity_threshold": None, "together_threshold": None, "stale_threshold": None}
    here = hub(rewards={**off, "min_norm_ratio": 0})
    found = here.round({"ann": honest["ann"], "copy": scaled(honest["ann"]), "bob": honest["bob"]})
    assert {one["verdict"] for one in found.values()} == {"merged"}
    assert {one["similarity"] for one in found.values()} == {None}


def test_a_chain_of_small_steps_does_not_make_one_of_two_that_are_unlike() -> None:
    import numpy as np

    alike = np.array([[1.0, 0.95, 0.8], [0.95, 1.0, 0.95], [0.8, 0.95, 1.0]])
    assert leaders(alike, [0, 1, 2], 0.9) == [0, 0, 2]
    assert leaders(alike, [1, 0, 2], 0.9) == [1, 1, 1]


def test_a_round_of_two_is_not_measured_by_the_larger_one() -> None:
    assert _zeros(RewardsConfig(), {"honest": 1.0, "300 times as large": 300.0}) == {}
    assert set(_zeros(RewardsConfig(), {"zeros": 0.0, "honest": 1.0, "too": 1.1})) == {"zeros"}


def test_the_similarity_of_two_updates_does_not_depend_on_the_codec_of_a_third(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = {"w": torch.randn(16, 32)}
    sent = [first, jittered(first, 0.5), {"w": torch.randn(16, 32)}]
    base = {"w": torch.zeros(16, 32)}
    spec = BaseSpec.of(base, "tiny")
    found = []
    for third in (DENSE, SIGNS):
        files = []
        for i, (delta, codec) in enumerate(zip(sent, (DENSE, DENSE, third), strict=True)):
            path = tmp_path / f"{third.codec}{i}.gymdelta"
            encode_delta(delta, base, codec, path, spec)
            files.append(DeltaFile.open(path, spec))
        found.append(float(compare(files, spec).similarity[0, 1]))
    assert found[0] == found[1] < 0.93


def test_an_update_of_zeros_is_like_nothing(tmp_path: Path) -> None:
    spec = BaseSpec.of({"w": torch.zeros(4, 8)}, "tiny")
    files = []
    for i, codec in enumerate((DENSE, SIGNS)):
        encode_delta(
            {"w": torch.zeros(4, 8)}, {"w": torch.zeros(4, 8)}, codec, tmp_path / f"{i}.gymdelta", spec
        )
        files.append(DeltaFile.open(tmp_path / f"{i}.gymdelta", spec))
    assert float(abs(compare(files, spec).similarity).max()) == 0.0
