"""One update under many keys, noisy or cut in pieces, is paid once; honest neighbours are paid each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gym_server.rewards.split import split
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.credit.running_score import paid_as_one
from gym_fed.soup.sybils.grouping import groups_of
from gym_fed.soup.sybils.similarity import Matrix, compare, torn_apart
from tests.support.measured import measured_round

DENSE = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
SIGNS = CodecPolicy(codec="bitdelta", error_feedback=False)
SHAPE = (64, 128)


def opened(folder: Path, deltas: list[Tensor], codecs: list[CodecPolicy]) -> tuple[list[DeltaFile], BaseSpec]:
    """Updates of one tensor."""
    base = {"w": torch.zeros(SHAPE)}
    spec, files = BaseSpec.of(base, "tiny"), []
    for i, (delta, codec) in enumerate(zip(deltas, codecs, strict=True)):
        encode_delta({"w": delta}, base, codec, folder / f"{i}.gymdelta", spec)
        files.append(DeltaFile.open(folder / f"{i}.gymdelta", spec))
    return files, spec


def cosines_of(people: list[int], own: float, honest: float, spread: float = 0.0, seed: int = 0) -> Matrix:
    """Cosines of a round in which person i has ``people[i]`` keys; ``spread`` is that of honest pairs."""
    who = np.repeat(np.arange(len(people)), people)
    between = honest + spread * np.random.default_rng(seed).standard_normal((len(people), len(people)))
    between = np.tril(between, -1) + np.tril(between, -1).T
    np.fill_diagonal(between, own)
    found = between[np.ix_(who, who)]
    np.fill_diagonal(found, 1.0)
    return np.asarray(found)


def grouped(cosines: Matrix, threshold: float = 0.3) -> list[list[int]]:
    """The groups of two or more."""
    torn = np.zeros(cosines.shape, dtype=bool)
    return [group for group in groups_of(cosines, torn, threshold) if len(group) > 1]


@pytest.mark.parametrize("keys", [2, 3, 4])
def test_keys_that_train_anew_on_one_text_are_one_where_honest_updates_are_nearly_as_close(
    keys: int,
) -> None:
    """Figures of stories260K after 20 steps: honest pairs around 0.38, keys of one person 0.51."""
    for seed in range(20):
        cosines = cosines_of([keys, 1, 1, 1], 0.51, 0.38, 0.01, seed)
        assert grouped(cosines) == [list(range(keys))], seed


@pytest.mark.parametrize("people", [3, 4, 5, 8])
def test_honest_updates_on_different_data_stay_apart_however_close_all_of_them_are(
    people: int,
) -> None:
    for honest in (0.0, 0.4, 0.6, 0.9):
        for seed in range(20):
            spread = 0.03 * (1 - honest)
            assert not grouped(cosines_of([1] * people, 1.0, honest, spread, seed)), (honest, seed)


def test_a_pair_as_close_as_the_keys_of_one_is_apart_where_honest_pairs_are_spread_as_far() -> None:
    spread_far = np.eye(5)
    pairs = [(i, j) for i in range(5) for j in range(i)]
    for (i, j), cosine in zip(pairs, np.linspace(0.2, 0.5, len(pairs)), strict=True):
        spread_far[i, j] = spread_far[j, i] = cosine
    assert not grouped(spread_far)
    close_together = np.where(spread_far >= 0.49, spread_far, 0.35)
    assert len(grouped(close_together)) == 1, "the same pair, among others that are all alike"


def test_noise_on_the_keys_of_one_does_not_make_one_of_honest_neighbours() -> None:
    """Keys with as much noise as update: 0.5 with each other, and 0.28 with others that have 0.4 with each other."""
    cosines = cosines_of([4, 1, 1, 1], 0.5, 0.4)
    cosines[:4, 4:] = cosines[4:, :4] = 0.28
    assert grouped(cosines) == [[0, 1, 2, 3]]


def test_noise_of_a_third_of_the_round_does_not_make_one_of_honest_neighbours() -> None:
    cosines = np.eye(6)
    cosines[:4, :4] += 0.6 * (1 - np.eye(4))
    assert not grouped(cosines), "the median of all pairs has noise in it"
    cosines = np.full((5, 5), 0.2)
    cosines[:3, :3] = 0.7
    np.fill_diagonal(cosines, 1.0)
    assert grouped(cosines) == [[0, 1, 2]], "three keys of one, two others"


def test_one_who_is_between_everybody_does_not_make_one_of_all() -> None:
    cosines = cosines_of([1] * 6, 1.0, 0.1)
    cosines[0, 1] = cosines[1, 0] = 0.5
    cosines[1, 2] = cosines[2, 1] = 0.45
    assert grouped(cosines) == [[0, 1]]
    nobody = np.zeros((0, 0))
    assert groups_of(nobody, nobody.astype(bool), 0.3) == []


def test_pieces_of_one_update_are_one_though_their_cosine_is_zero() -> None:
    torn = np.zeros((4, 4), dtype=bool)
    torn[0, 1] = torn[1, 0] = True
    assert sorted(groups_of(np.eye(4), torn, 0.3)) == [[0, 1], [2], [3]]


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


def test_who_is_paid_as_one_gets_one_part_and_the_mean_score() -> None:
    config = RewardsConfig(score="estimate", quality_weight=0.5)
    reputations = {"ann": 0.0, "ann2": 0.0, "ann3": 0.0, "bob": 0.0}
    scores = measured_round({"ann": 0.3, "ann2": 0.1, "ann3": -0.1, "bob": 0.2})
    asked: list[set[str]] = []

    def together(earning: object) -> list[list[str]]:
        asked.append(set(earning))  # type: ignore[call-overload]
        return [["ann", "ann2"]]

    found = split(config, reputations, scores, together=together)
    assert asked == [{"ann", "ann2", "bob"}], "an update without a score above chance is not compared"
    assert found.credits == {"ann": 125 + 84, "ann2": 125 + 83, "ann3": 167, "bob": 250 + 166}
    assert sum(found.credits.values()) + found.left == 1000


def test_scores_below_zero_do_not_inflate_what_a_group_is_paid() -> None:
    parts = {"a": 0.6, "b": 0.6, "c": -0.29, "d": -0.309}
    found = paid_as_one({who: np.array([value]) for who, value in parts.items()}, [["a", "b"]])
    assert {who: float(one[0]) for who, one in found.items()} == pytest.approx(
        {"a": 0.6, "b": 0.6, "c": -0.58, "d": -0.618}
    )


def test_many_keys_take_nothing_from_the_others_where_scores_are_paid() -> None:
    config = RewardsConfig(score="estimate", pool=10_000)
    alone = split(config, dict.fromkeys(("ann", "bob"), 0.0), measured_round({"ann": 0.05, "bob": 0.05}))
    keys = measured_round({"ann1": 0.02, "ann2": 0.02, "ann3": 0.02, "ann4": 0.02, "bob": 0.02})
    names = ["ann1", "ann2", "ann3", "ann4"]
    many = split(config, dict.fromkeys((*names, "bob"), 0.0), keys, together=lambda _: [names])
    assert alone.credits["bob"] == many.credits["bob"] == sum(many.credits[one] for one in names) == 500
