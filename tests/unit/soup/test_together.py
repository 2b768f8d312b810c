"""One update under many keys, noisy or cut in pieces, is paid once; honest neighbours are paid each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gym_server.rewards.free_riders import RoundSimilarity
from gym_server.rewards.split import split
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.credit import RunningScore, divided, divisors_as_one, pay_by_score
from gym_fed.soup.screening import Matrix, beyond, compare, groups_of, same_source, torn_apart
from tests.support.measured import even, measured_round

DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
SIGNS = CodecPolicy(codec="bitdelta", error_feedback=False)
SPARSE = CodecPolicy(codec="sparse_sign", error_feedback=False)
SHAPE = (64, 128)


def opened(folder: Path, deltas: list[Tensor], codecs: list[CodecPolicy]) -> tuple[list[DeltaFile], BaseSpec]:
    """Updates of one tensor."""
    base = {"w": torch.zeros_like(deltas[0])}
    spec, files = BaseSpec.of(base, "tiny"), []
    for i, (delta, codec) in enumerate(zip(deltas, codecs, strict=True)):
        encode_delta({"w": delta}, base, codec, folder / f"{i}.gymdelta", spec)
        files.append(DeltaFile.open(folder / f"{i}.gymdelta", spec))
    return files, spec


def test_what_is_close_is_measured_by_the_round_itself() -> None:
    cosines = np.full((4, 4), 0.6) + 0.4 * np.eye(4)
    assert np.allclose(beyond(cosines), np.eye(4))
    cosines[0, 1] = cosines[1, 0] = 0.8
    assert beyond(cosines)[0, 1] == pytest.approx(0.5)
    assert beyond(np.ones((1, 1)))[0, 0] == 1.0
    assert np.isfinite(beyond(np.ones((3, 3)))).all()


def test_noise_of_a_third_of_the_round_does_not_make_one_of_honest_neighbours() -> None:
    cosines = np.eye(6)
    cosines[:4, :4] += 0.6 * (1 - np.eye(4))
    assert np.median(cosines[~np.eye(6, dtype=bool)]) == 0.0, "the median pair has noise in it"
    assert beyond(cosines)[0, 1] == pytest.approx(0.0)
    cosines = np.full((5, 5), 0.2)
    cosines[:3, :3] = 0.7
    assert beyond(cosines)[0, 1] == pytest.approx(0.5 / 0.8), "three keys of one, two others"


def test_two_groups_are_one_only_if_the_mean_of_their_links_is_strong() -> None:
    between = np.array([[1.0, 0.4, 0.1], [0.4, 1.0, 0.5], [0.1, 0.5, 1.0]])
    assert sorted(groups_of(between, 0.3)) == [[0], [1, 2]]
    keys, apart = np.ones((5, 5)), np.full(4, 0.1)
    keys[:4, 4] = keys[4, :4] = apart
    keys[1, 2] = keys[2, 1] = 0.2
    assert sorted(groups_of(keys, 0.6)) == [[0, 1, 2, 3], [4]], "chance has separated one pair of four keys"
    keys[0, 4] = keys[4, 0] = 1.0
    assert sorted(groups_of(keys, 0.6)) == [[0, 1, 2, 3], [4]], "the fifth is linked to one of four"
    assert sorted(groups_of(np.full((3, 3), 0.4), 0.3)) == [[0, 1, 2]]
    assert groups_of(np.zeros((0, 0)), 0.3) == []


def by_definition(links: Matrix, threshold: float) -> list[list[int]]:
    """Join the two groups whose mean link is the strongest, until none is linked."""
    groups = [[i] for i in range(len(links))]
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        strength = {(a, b): round(links[np.ix_(groups[a], groups[b])].mean(), 9) for a, b in pairs}
        a, b = max(pairs, key=lambda pair: strength[pair])
        if strength[a, b] < threshold - 1e-9:
            break
        groups[b] = sorted(groups[b] + groups.pop(a))
    return groups


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
def test_groups_are_those_of_the_definition_with_ties_too(threshold: float) -> None:
    generator = np.random.default_rng(0)
    for size in range(1, 12):
        links = np.round(generator.random((size, size)), 1)
        links = np.minimum(links, links.T)
        assert groups_of(links, threshold) == by_definition(links, threshold)


def test_a_thousand_contributors_are_grouped() -> None:
    groups = groups_of(np.full((1000, 1000), 0.5), 0.3)  # hours, if every join looked at all pairs again
    assert groups == [list(range(1000))]


def previous_cosines(people: list[int], personal: float = 1.0, seed: int = 0) -> Matrix:
    """Cosines of updates of two rounds: a common direction, one for each person, and the chance of each round."""
    generator = np.random.default_rng(seed)
    common, own = generator.normal(size=(1, 20_000)), generator.normal(size=(max(people) + 1, 20_000))
    now, before = (
        common + personal * own[people] + 1.5 * generator.normal(size=(len(people), 20_000)) for _ in range(2)
    )
    norms = np.outer(np.linalg.norm(now, axis=1), np.linalg.norm(before, axis=1))
    return np.asarray(now @ before.T / norms)


def test_keys_that_train_separately_on_the_same_data_have_the_same_source_and_others_do_not() -> None:
    found = same_source(previous_cosines([0, 0, 0, 1, 2, 3]))
    expected = np.zeros((6, 6), dtype=bool)
    expected[:3, :3] = True
    assert (found == expected).all(where=~np.eye(6, dtype=bool))


def test_noise_that_only_one_key_adds_does_not_hide_the_same_source() -> None:
    cosines = previous_cosines([0, 0, 1, 2])
    diluted = np.array([0.5, 1.0, 1.0, 1.0])
    assert same_source(cosines * np.outer(diluted, diluted))[0, 1]


def test_updates_without_anything_personal_have_no_same_source() -> None:
    for seed in range(5):
        found = same_source(previous_cosines(list(range(8)), personal=0.0, seed=seed))
        assert np.count_nonzero(found & ~np.eye(8, dtype=bool)) <= 4


def test_without_a_previous_update_or_a_third_contributor_nothing_has_the_same_source() -> None:
    cosines = previous_cosines([0, 0, 1, 2])
    cosines[:, 1] = np.nan
    assert not same_source(cosines)[0, 1]
    assert not same_source(previous_cosines([0, 0])).any()
    unrelated = previous_cosines([0, 0, 1, 2])
    unrelated[np.arange(4), np.arange(4)] = [-0.01, 0.001, 0.4, 0.4]
    assert not same_source(unrelated)[0, 1], "who does not resemble itself resembles nobody"


@pytest.mark.parametrize("correlation", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("second", [DENSE, SPARSE], ids=lambda codec: codec.codec)
def test_cosines_of_the_largest_weights_count_as_those_of_what_was_written(
    tmp_path: Path, second: CodecPolicy, correlation: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 600, 1024, generator=generator)
    deltas = [one, correlation * one + (1 - correlation**2) ** 0.5 * other]
    files, spec = opened(tmp_path, deltas, [SPARSE, second])
    assert compare(files, spec).cosine[0, 1] == pytest.approx(correlation, abs=0.03)


@pytest.mark.parametrize("second", [DENSE, SIGNS], ids=lambda codec: codec.codec)
@pytest.mark.parametrize("first", [DENSE, SIGNS], ids=lambda codec: codec.codec)
def test_cosines_of_signs_count_as_those_of_what_was_written(
    tmp_path: Path, first: CodecPolicy, second: CodecPolicy
) -> None:
    torch.manual_seed(0)
    one = torch.randn(SHAPE)
    files, spec = opened(tmp_path, [one, one + 0.6 * torch.randn(SHAPE)], [first, second])
    assert compare(files, spec).cosine[0, 1] == pytest.approx(1 / (1 + 0.36) ** 0.5, abs=0.03)


def test_pieces_of_one_update_are_found_and_sparse_updates_made_apart_are_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, mask = torch.randn(SHAPE), torch.rand(SHAPE) < 0.5
    sparse = [torch.randn(SHAPE) * (torch.rand(SHAPE) < 0.1) for _ in range(2)]
    deltas = [whole * mask, whole * ~mask, *sparse, torch.randn(SHAPE)]
    files, spec = opened(tmp_path, deltas, [DENSE] * 5)
    expected = np.zeros((5, 5), dtype=bool)
    expected[0, 1] = expected[1, 0] = True
    assert (torn_apart(files, spec) == expected).all()


def test_groups_of_signs_without_scales_are_left_out_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, grouped = torch.randn(SHAPE), SIGNS.model_copy(update={"group_size": 32})
    half = torch.zeros(SHAPE)
    half[:, :64] = 1.0
    files, spec = opened(tmp_path, [whole * half, whole * (1 - half), whole], [grouped] * 3)
    found = torn_apart(files, spec)
    assert found[0, 1]
    assert not found[:2, 2].any()


def test_who_is_paid_as_one_gets_one_part_and_together_the_mean_score() -> None:
    config = RewardsConfig(score="estimate", quality_weight=0.5)
    reputations = {"ann": 0.0, "ann2": 0.0, "ann3": 0.0, "bob": 0.0}
    scores = measured_round({"ann": 0.3, "ann2": 0.1, "ann3": -0.1, "bob": 0.2})
    asked: list[set[str]] = []

    def together(earning: object) -> list[list[str]]:
        asked.append(set(earning))  # type: ignore[call-overload]
        return [["ann", "ann2"]]

    found = split(config, reputations, scores, together=together)
    assert asked == [set(reputations)], "a running score is paid in rounds without a score above chance, too"
    assert found.credits == {"ann": 188 + 84, "ann2": 62 + 83, "ann3": 167, "bob": 250 + 166}
    assert sum(found.credits.values()) + found.left == 1000


def test_scores_below_zero_do_not_inflate_what_a_group_is_paid() -> None:
    parts = {"a": 0.6, "b": 0.6, "c": -0.29, "d": -0.309}
    found = divided(
        {who: np.array([value]) for who, value in parts.items()}, {"a": 2, "b": 2, "c": 1, "d": 1}
    )
    assert {who: float(one[0]) for who, one in found.items()} == pytest.approx(
        {"a": 0.6, "b": 0.6, "c": -0.58, "d": -0.618}
    )


@pytest.mark.parametrize("harm", [-0.02, -0.005, 0.0])
def test_a_key_that_sends_harm_takes_no_score_of_the_contributor_it_is_linked_with(harm: float) -> None:
    people = {"ann": 0.02, "bob": 0.02, "cat": 0.02}
    alone = split(RewardsConfig(score="estimate"), dict.fromkeys(people, 0.0), measured_round(people, 0.06))
    linked = measured_round({**people, "eve": harm}, 0.06)
    found = split(
        RewardsConfig(score="estimate"),
        dict.fromkeys(linked.parts, 0.0),
        linked,
        together=lambda _: [["ann", "eve"]],
    )
    assert found.running_scores["ann"].brought == pytest.approx(0.02)
    assert found.running_scores["eve"].brought == pytest.approx(harm)
    assert found.credits["ann"] == alone.credits["ann"] - found.credits["eve"], "they share one participation"
    assert "ann" in found.earning
    assert "eve" not in found.earning


def test_luck_lowers_no_score_and_many_keys_of_it_have_no_more_than_one() -> None:
    scores = {"ann": 0.02, "ann2": 0.01, "new": 0.002, "new2": 0.001, "bad": -0.03}
    found = divisors_as_one(scores, [list(scores)], {"ann", "ann2", "bad"})
    assert found == {"ann": 2, "ann2": 2, "new": 4, "new2": 4, "bad": 1}
    assert divisors_as_one({"a": 0.1, "b": 0.1, "c": 0.1}, [["a", "b"]], ()) == {"a": 2, "b": 2, "c": 1}


@pytest.mark.parametrize("score", [1.0, 2.0])
@pytest.mark.parametrize("keys", [2, 4])
def test_many_keys_with_noisy_scores_have_no_more_than_the_summed_score_of_one(
    keys: int, score: float
) -> None:
    generator, eves, others = np.random.default_rng(0), [f"eve{i}" for i in range(keys)], list("abcdef")
    running: dict[str, RunningScore] = {}
    for _ in range(100):
        drawn = dict(zip([*eves, *others], generator.normal(score, 1.0, keys + 6).tolist(), strict=True))
        measured = measured_round(drawn, chance=1.0, running_scores=running)
        config = RewardsConfig(score="estimate")
        running = split(config, dict.fromkeys(drawn, 0.0), measured, lambda _: [eves]).running_scores
    brought = {who: max(0.0, one.brought) if one.is_work else 0.0 for who, one in running.items()}
    assert sum(brought[who] for who in eves) < 1.4 * sum(brought[who] for who in others) / len(others)


def test_many_keys_take_nothing_from_the_others_where_scores_are_paid() -> None:
    config = RewardsConfig(score="estimate", pool=10_000)
    alone = split(config, dict.fromkeys(("ann", "bob"), 0.0), measured_round({"ann": 0.05, "bob": 0.05}))
    keys = measured_round({"ann1": 0.02, "ann2": 0.02, "ann3": 0.02, "ann4": 0.02, "bob": 0.02})
    names = ["ann1", "ann2", "ann3", "ann4"]
    many = split(config, dict.fromkeys((*names, "bob"), 0.0), keys, together=lambda _: [names])
    assert alone.credits["bob"] == many.credits["bob"] == sum(many.credits[one] for one in names) == 500


def test_duplicates_are_no_part_of_the_background() -> None:
    cosines = np.full((7, 7), 0.3)
    cosines[:5, :5] = 0.9
    np.fill_diagonal(cosines, 1.0)
    names = ["eve1", "eve2", "copy1", "copy2", "copy3", "ann", "bob"]
    similarity = RoundSimilarity({}, names, cosines, np.zeros((7, 7), dtype=bool), np.full((7, 7), np.nan))
    assert similarity.together(names, 0.6) == [], "most of the round's keys are one person's"
    assert similarity.together([*names[:2], "ann", "bob"], 0.6) == [["eve1", "eve2"]]
    assert similarity.comparable == set()


def test_a_small_pool_pays_first_who_has_got_least_for_its_scores() -> None:
    scores = {"ann": RunningScore(even(0.1), earned=500), "bob": RunningScore(even(0.1), earned=100)}
    scores["new"] = RunningScore(even(0.02))
    run = RunningScore(even(0.3), earned=600)
    paid = pay_by_score(scores, run, even(1.0), list(scores), 10_000, 300)
    assert paid == {"ann": 0, "bob": 233, "new": 67}, (
        "333 credits for a tenth of a nat, and as much for each nat"
    )
    assert pay_by_score(scores, run, even(1.0), list(scores), 10_000, 9_999) == {
        "ann": 500,
        "bob": 900,
        "new": 200,
    }
