"""Long updates keep their length by verdict, or share a budget; nothing else differs from ``byzantine_robust``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import DeltaEntry, write_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.aggregators.byzantine_evidence import BUDGET, LONG, MAX_LENGTH, ByzantineEvidence
from gym_fed.soup.aggregators.byzantine_robust import ByzantineRobust
from gym_fed.soup.gram import GramMatrix, RowEvidence
from gym_fed.soup.merging import claims, merge
from gym_fed.soup.pipeline import Pipeline
from gym_fed.soup.rule import RuleConfig

SHAPES = {"a.weight": (8, 64), "b.weight": (64, 8)}
SPEC = BaseSpec.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "two matrices")
PARAMS = {"lora": {"rank": 4}}
SOUP = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


def gram_of(lengths: list[float], seed: int = 0, verdicts: list[bool] | None = None) -> GramMatrix:
    """Updates of these lengths in random directions."""
    updates = torch.randn(len(lengths), 400, generator=torch.Generator().manual_seed(seed)).double()
    updates = updates / updates.norm(dim=1, keepdim=True) * torch.tensor(lengths)[:, None]
    gram = GramMatrix.of(updates, torch.ones(len(lengths)))
    return gram if verdicts is None else replace(gram, evidence=RowEvidence(verdicts))


def weights(gram: GramMatrix, malicious: int = 0) -> tuple[Tensor, Tensor]:
    """The rule's coefficients, and those of ``byzantine_robust``."""
    config = RuleConfig(num_malicious_nodes=malicious)
    return ByzantineEvidence(config).weigh(gram), ByzantineRobust(config).weigh(gram)


def test_updates_of_one_length_are_weighted_as_by_byzantine_robust() -> None:
    for verdicts in (None, [True] * 7):
        found, robust = weights(gram_of([2.0] * 7, verdicts=verdicts), malicious=1)
        torch.testing.assert_close(found, robust, rtol=1e-9, atol=0.0)


def test_a_long_update_with_a_good_verdict_keeps_its_length_and_with_a_bad_one_is_cut_to_the_median() -> None:
    lengths = [1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    found, robust = weights(gram_of(lengths, verdicts=[False] * 5 + [True, False]))
    torch.testing.assert_close(found / robust, torch.tensor([1.0] * 5 + [3.0, 1.0], dtype=torch.float64))


def test_a_short_update_is_lifted_to_the_median() -> None:
    found, _ = weights(gram_of([0.25, 1.0, 1.0, 1.0, 1.0], verdicts=[False] * 5))
    torch.testing.assert_close(found, torch.tensor([0.8, 0.2, 0.2, 0.2, 0.2], dtype=torch.float64))


def test_a_verdict_has_no_effect_on_an_update_that_is_hardly_longer_than_the_median() -> None:
    found, robust = weights(gram_of([1.0, 1.0, 1.0, LONG - 0.01, LONG + 0.01], verdicts=[True] * 5))
    assert (found / robust).tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, LONG + 0.01])


@pytest.mark.parametrize("verdict", [True, False])
def test_an_update_a_thousand_times_as_long_counts_for_at_most_four_medians(verdict: bool) -> None:
    gram = gram_of([1.0] * 9 + [1000.0], verdicts=[False] * 9 + [verdict])
    found, _ = weights(gram, malicious=2)
    assert float(found[-1] * 1000.0) <= MAX_LENGTH / 10 * 1.001


def test_the_length_of_the_soup_scales_all_weights() -> None:
    gram = gram_of([1.0, 2.0, 0.5, 1.0, 3.0], verdicts=[True] * 5)
    whole, _ = weights(gram)
    half, _ = weights(replace(gram, evidence=RowEvidence([True] * 5, 0.5)))
    assert torch.equal(half, 0.5 * whole)


def test_without_verdicts_all_excess_lengths_share_the_budget() -> None:
    lengths = [1.0] * 6 + [4.0, 4.0, 1000.0, 2.0]
    found, robust = weights(gram_of(lengths))
    excess = found / robust - 1.0
    assert float(excess.sum()) == pytest.approx(BUDGET)
    assert excess[6:].tolist() == pytest.approx([BUDGET * part / 10.0 for part in (3.0, 3.0, 3.0, 1.0)])
    little, robust = weights(gram_of([1.0] * 6 + [1.5]))
    assert (little / robust).tolist() == pytest.approx([1.0] * 6 + [1.5])


def test_an_update_that_the_filter_drops_uses_up_no_budget() -> None:
    updates = torch.randn(12, 300, generator=torch.Generator().manual_seed(1)) + 0.5
    updates[:3] = -40.0 * updates[3:].mean(0)
    updates[-1] *= 3.0
    found, robust = weights(GramMatrix.of(updates, torch.ones(12)), malicious=3)
    assert robust[:3].abs().max() < 1e-3
    assert float(found[-1] / robust[-1]) > 2.0


def test_an_update_that_points_away_from_the_root_update_has_no_weight_whatever_its_verdict() -> None:
    root = torch.zeros(400)
    root[0] = 1.0
    updates = torch.randn(7, 400, generator=torch.Generator().manual_seed(4)).double()
    updates[:, 0] = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, -1.0, -2.0])
    updates[-1] *= 3.0
    gram = GramMatrix.of(updates, torch.ones(7), root)
    found, _ = weights(replace(gram, evidence=RowEvidence([True] * 7)), malicious=1)
    assert (found[:5] > 0.0).all()
    assert found[5:].tolist() == [0.0, 0.0]
    rule = ByzantineEvidence(RuleConfig())
    assert rule.claims(gram)[1].tolist() == [0.0] * 7
    with pytest.raises(GymError, match="no update of 7 has a positive cosine") as refused:
        rule.weigh(replace(gram, root=torch.cat([-gram.root[:-1].abs(), gram.root[-1:]])))
    assert refused.value.code is ErrorCode.UPDATE_REFUSED


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("judged", [True, False])
def test_few_updates_are_merged(count: int, judged: bool) -> None:
    lengths = [1.0, 3.0, 9.0][:count]
    found, _ = weights(gram_of(lengths, verdicts=[True] * count if judged else None))
    assert torch.isfinite(found).all()
    assert (found > 0.0).all()


def test_updates_of_zeros_give_zeros_and_stay_without_effect_among_others() -> None:
    for verdicts in (None, [True] * 5):
        found, _ = weights(gram_of([0.0] * 5, verdicts=verdicts))
        assert torch.isfinite(found).all()
        found, _ = weights(gram_of([0.0, 0.0, 1.0, 1.0, 1.0], verdicts=verdicts), malicious=1)
        assert torch.isfinite(found).all()
        most, _ = weights(gram_of([0.0, 0.0, 0.0, 1.0, 50.0], verdicts=verdicts))
        assert most[3:].tolist() == [0.0, 0.0]


def files(folder: Path, codec: str, lengths: list[float]) -> list[DeltaFile]:
    generator = torch.Generator().manual_seed(3)
    opened = []
    for index, length in enumerate(lengths):
        path = folder / f"{index}.gymdelta"
        entries = [
            DeltaEntry.of(
                name, length * torch.randn(shape, generator=generator), codec, **PARAMS.get(codec, {})
            )
            for name, shape in SHAPES.items()
        ]
        write_delta(path, entries, SPEC)
        opened.append(DeltaFile.open(path, SPEC))
    return opened


@pytest.mark.parametrize("codec", ["bitdelta", "dense", "lora"])
def test_a_merge_of_files_uses_claims_and_verdicts_of_packed_float_and_low_rank_updates(
    tmp_path: Path, codec: str
) -> None:
    lengths = [1.0, 1.1, 0.9, 3.0, 3.5]
    updates = files(tmp_path, codec, lengths)
    recipe = SoupRecipe(aggregator="byzantine_evidence", num_malicious_nodes=1, codec=SOUP, max_norm=1e3)
    base, claimed = claims(updates, [1.0] * 5, recipe, SPEC)
    assert [claim > 0.0 for claim in claimed] == [False, False, False, True, True]
    out = tmp_path / "soup.gymdelta"
    verdicts = [False, False, False, True, False]
    report = merge(updates, [1.0] * 5, recipe, out, SPEC, evidence=RowEvidence(verdicts))
    wanted = [base[i] + claimed[i] * verdicts[i] for i in range(5)]
    assert report.coefficients == pytest.approx(wanted, rel=1e-12)
    with DeltaFile.open(out, SPEC) as soup:
        for name in SHAPES:
            by_hand = sum(c * u.decode(name).double() for c, u in zip(wanted, updates, strict=True))
            torch.testing.assert_close(soup.decode(name).double(), by_hand, rtol=1e-4, atol=1e-5)
    again = merge(
        updates, [1.0] * 5, recipe, tmp_path / "again.gymdelta", SPEC, evidence=RowEvidence(verdicts)
    )
    assert again.sha256 == report.sha256
    other = merge(
        updates, [1.0] * 5, recipe, tmp_path / "other.gymdelta", SPEC, evidence=RowEvidence([False] * 5)
    )
    assert other.sha256 != report.sha256


def test_verdicts_are_refused_by_other_rules_after_pre_aggregators_and_in_a_wrong_number(
    tmp_path: Path,
) -> None:
    updates = files(tmp_path, "bitdelta", [1.0, 2.0, 3.0])
    for changes, reason in (
        ({"aggregator": "byzantine_robust"}, "uses no verdicts"),
        ({"aggregator": "byzantine_evidence", "pre_aggregators": ["nnm"]}, "pre_aggregators nnm change"),
    ):
        recipe = SoupRecipe.model_validate({"codec": SOUP, **changes})
        with pytest.raises(GymError, match=reason) as refused:
            merge(
                updates, [1.0] * 3, recipe, tmp_path / "soup.gymdelta", SPEC, evidence=RowEvidence([True] * 3)
            )
        assert refused.value.code is ErrorCode.CONFIG_INVALID
        with pytest.raises(GymError, match=reason):
            claims(updates, [1.0] * 3, recipe, SPEC)
    recipe = SoupRecipe(aggregator="byzantine_evidence", codec=SOUP)
    with pytest.raises(GymError, match="3 updates but 2 verdicts"):
        merge(updates, [1.0] * 3, recipe, tmp_path / "soup.gymdelta", SPEC, evidence=RowEvidence([True] * 2))
    for length in (0.0, 1.1, float("nan")):
        with pytest.raises(GymError, match="is not a share of its full length"):
            merge(
                updates,
                [1.0] * 3,
                recipe,
                tmp_path / "soup.gymdelta",
                SPEC,
                evidence=RowEvidence([True] * 3, length),
            )
    assert not (tmp_path / "soup.gymdelta").exists()


def test_without_verdicts_pre_aggregators_may_come_first() -> None:
    pipeline = Pipeline.of(SoupRecipe(aggregator="byzantine_evidence", pre_aggregators=["nnm"]))
    updates = torch.randn(7, 50, generator=torch.Generator().manual_seed(2))
    assert torch.isfinite(pipeline.aggregate(updates, torch.ones(7))).all()
