"""DeltaSoup in Python: merging, malicious clients, and broken files that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, METHODS
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from gym_fed.quantization import AggregationMethod, DeltaSoup, DeltaSoupConfig

EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 8))


def tuned(seed: int, toward: float = 0.02, noise: float = 0.005) -> nn.Module:
    """A fine-tune that moves where all others move, and a bit elsewhere."""
    model, generator = base(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += toward + noise * torch.randn(parameter.shape, generator=generator)
    return model


def soup_of(models: dict[str, Any], **config: Any) -> DeltaSoup:
    soup = DeltaSoup(DeltaSoupConfig(**{"codec": EXACT, "soup_codec": EXACT, **config}), base())
    for user, model in models.items():
        assert soup.contribute(user_id=user, model=model) is soup
    return soup


def change(soup: DeltaSoup, **arguments: Any) -> torch.Tensor:
    model = base()
    soup.aggregate(**arguments).apply(model)
    before = torch.cat([p.detach().reshape(-1) for p in base().parameters()])
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before


NEEDS_MORE = {"fltrust", "fltrust_caf", "root_gate", "fisher", "regmean", "greedy_soup"}
ADDS_UP = {"task_arithmetic", "dare_ties", "della"}
"""A sum by definition, or a mean over those models only that kept a weight and made it larger for what they dropped."""

HONEST = {f"user{i}": tuned(i) for i in range(6)}


def test_methods_of_the_enumeration_are_the_rules_of_the_registry() -> None:
    assert {m.value for m in AggregationMethod} == {*AGGREGATORS.names(), *METHODS.names()}


@pytest.mark.few(9, "test_soup_cli has every rule")
@pytest.mark.parametrize("method", [m for m in AggregationMethod if m not in NEEDS_MORE])
def test_every_method_moves_the_base_where_the_contributors_moved_it(method: AggregationMethod) -> None:
    moved = change(soup_of(HONEST, method=method))
    if method in ADDS_UP:
        assert float(moved.mean()) > 0.02
    else:
        assert float(moved.mean()) == pytest.approx(0.02, abs=0.006)


def test_malicious_clients_move_the_default_hardly_and_the_mean_a_lot() -> None:
    malicious = {f"malicious{i}": tuned(10 + i, toward=-0.02) for i in range(2)}
    robust = change(soup_of({**HONEST, **malicious}, num_malicious_nodes=2))
    mean = change(soup_of({**HONEST, **malicious}, method=AggregationMethod.MEAN))
    assert float(robust.mean()) == pytest.approx(0.02, abs=0.002)
    assert float(mean.mean()) == pytest.approx(0.01, abs=0.002)


def test_without_a_number_the_default_withstands_a_fifth() -> None:
    config = DeltaSoupConfig()
    assert [config.malicious_of(n) for n in (1, 2, 3, 4, 5, 10, 20)] == [0, 0, 1, 1, 1, 2, 4]
    assert DeltaSoupConfig(method=AggregationMethod.MEDIAN).malicious_of(20) == 0


def test_one_bit_contributions_make_nearly_the_same_soup() -> None:
    one_bit = change(soup_of(HONEST, codec=CodecPolicy(error_feedback=False)))
    assert float(one_bit.mean()) == pytest.approx(0.02, abs=0.002)


def test_a_contribution_far_above_the_median_norm_stays_out_with_the_reason() -> None:
    result = soup_of({**HONEST, "loud": tuned(9, toward=5.0)}).aggregate()
    assert "loud" not in result.merged
    assert "times the median" in result.rejected["loud"]


def test_rewards_are_paid_out_whole_to_those_in_the_soup() -> None:
    result = soup_of(
        {**HONEST, "loud": tuned(9, toward=5.0)}, enable_rewards=True, reward_pool=100
    ).aggregate()
    assert sum(result.rewards.values()) == 100
    assert result.rewards["loud"] == 0
    assert set(result.rewards.values()) - {0} == {16, 17}
    assert soup_of(HONEST).aggregate().rewards == {}


def test_files_are_taken_as_they_are_and_broken_ones_leave_the_others(tmp_path: Path) -> None:
    soup = soup_of(HONEST)
    entries = [DeltaEntry.of(n, torch.full(s, 0.02)) for n, s in soup.spec.shapes.items()]
    write_delta(tmp_path / "fine.gymdelta", entries, soup.spec)
    soup.contribute(user_id="file", model=tmp_path / "fine.gymdelta")
    broken = bytearray((tmp_path / "fine.gymdelta").read_bytes())
    broken[40] ^= 255
    (tmp_path / "broken.gymdelta").write_bytes(broken)
    nan = tuned(3)
    nn.init.constant_(nan[0].weight, float("nan"))  # type: ignore[arg-type]
    for model in (tmp_path / "broken.gymdelta", nan, nn.Linear(3, 3), str(tmp_path / "none.gymdelta")):
        with pytest.raises(GymError):
            soup.contribute(user_id="bad", model=model)
    assert soup.contributors == (*HONEST, "file")
    assert set(soup.aggregate().merged) == {*HONEST, "file"}


def test_examples_count_up_to_the_cap() -> None:
    soup = DeltaSoup(
        DeltaSoupConfig(method="weighted_mean", num_examples_cap=100, codec=EXACT, soup_codec=EXACT), base()
    )
    soup.contribute(user_id="one", model=tuned(1, 0.0, 0.0), num_examples=100)
    soup.contribute(user_id="two", model=tuned(2, 0.04, 0.0), num_examples=10**9)
    assert float(change(soup, min_contributors=2).mean()) == pytest.approx(0.02, abs=1e-5)


def test_a_soup_is_saved_once_and_applies_to_its_base_only(tmp_path: Path) -> None:
    result = soup_of(HONEST).aggregate()
    path = result.save(tmp_path / "new" / "soup.gymdelta")
    assert path.stat().st_size == result.report.size_bytes
    with pytest.raises(GymError) as caught:
        result.save(path)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    with pytest.raises(GymError) as caught:
        result.apply(tuned(1))
    assert caught.value.code is ErrorCode.BASE_MISMATCH


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "fisher"}, "fisher diagonals"),
        ({"method": "greedy_soup"}, "held-out score"),
        ({"method": "ties", "pre_aggregators": ["nnm"]}, "trusts every model"),
        ({"method": "ties", "num_malicious_nodes": 1}, "trusts every model"),
        ({"method": "krum", "num_malicious_nodes": 3}, "needs 9"),
        ({"method": "trimmed_mean", "method_options": {"colour": 1}}, "colour"),
    ],
)
def test_what_a_method_cannot_do_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(GymError, match=message):
        soup_of(HONEST, **config).aggregate()


def test_too_few_contributions_are_distinguished_from_a_rule_that_needs_more() -> None:
    with pytest.raises(GymError, match="2 of 2 contributions can be merged; 3 are needed") as caught:
        soup_of({"a": tuned(1), "b": tuned(2)}).aggregate(min_contributors=3)
    assert caught.value.code is ErrorCode.ROUND_ABORTED


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"differential_privacy": {"epsilon": 1.0}}, "differential_privacy"),
        ({"codec": CodecPolicy()}, "error_feedback"),
        ({"method": "best"}, "method"),
        ({"method": "fltrust"}, "root update"),
        ({"method": "fltrust_caf"}, "root update"),
        ({"method": "krum", "root": "own.gymdelta"}, "krum takes no root update"),
        ({"method": "ties", "root": "own.gymdelta"}, "ties takes no root update"),
        ({"method": "fltrust", "root": "own.gymdelta", "differential_privacy": {}}, "'fltrust': the effect"),
        ({"norm_ratio": 0.5}, "norm_ratio"),
        ({"norm_ratio": 4.0, "differential_privacy": {}}, "write norm_ratio: null"),
        (
            {"method": "byzantine_robust", "differential_privacy": {}},
            "'byzantine_robust': the effect of one contribution",
        ),
        (
            {"method": "mean", "norm_ratio": None, "num_examples_cap": 3, "differential_privacy": {}},
            "use uniform",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeltaSoupConfig(**config)


def test_a_private_soup_is_the_clipped_mean_behind_noise_and_every_further_one_costs_more() -> None:
    options = {"differential_privacy": {"clipping_norm": 0.5}}
    soup = soup_of(HONEST, **options)
    first, second = soup.aggregate(), soup.aggregate()
    assert first.report.sha256 != second.report.sha256
    assert first.epsilon == pytest.approx(
        4.377, abs=1e-3
    )  # dp-accounting: one Gaussian of multiplier 1, delta 1e-5
    assert first.epsilon is not None
    assert second.epsilon is not None
    assert second.epsilon > first.epsilon
    moved = change(soup)
    honest = change(soup_of(HONEST, method="mean"))
    noise = moved - honest * 0.5 / soup_norm(HONEST)
    assert noise.std().item() == pytest.approx(0.5 / 6, rel=0.1)
    assert soup_of(HONEST, method="mean").aggregate().epsilon is None


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The coordinator's own update, from clean rows."""
    entries = [DeltaEntry.of(n, torch.full(s, 0.01)) for n, s in soup_of({}).spec.shapes.items()]
    write_delta(tmp_path / "own.gymdelta", entries, soup_of({}).spec)
    return str(tmp_path / "own.gymdelta")


@pytest.mark.parametrize(
    "method", [name for name in AGGREGATORS.own() if AGGREGATORS.type_of(name).takes_root()]
)
def test_a_root_update_is_given_to_every_method_that_takes_one(method: str, own: str) -> None:
    malicious = {f"malicious{i}": tuned(10 + i, toward=-0.02) for i in range(3)}
    moved = change(soup_of({**HONEST, **malicious}, method=method, root=own, num_malicious_nodes=3))
    assert float(moved.mean()) > 0.006


def test_a_private_soup_with_a_root_update_counts_no_update_that_points_away_from_it(own: str) -> None:
    privacy = {"noise_multiplier": 0.2, "clipping_norm": 10.0}
    soup = soup_of(
        {**HONEST, **{f"malicious{i}": tuned(10 + i, toward=-0.02) for i in range(2)}},
        root=own,
        differential_privacy=privacy,
    )
    assert soup.config.method is AggregationMethod.ROOT_GATE
    moved = change(soup)
    # Six of eight count, at the root update's length; so does the noise's sensitivity.
    length = 0.01 * len(moved) ** 0.5
    assert float(moved.mean()) == pytest.approx(0.01 * 6 / 8, abs=4 * 0.2 * length / 8 / len(moved) ** 0.5)
    expected = NoiseEvent(noise_multiplier=0.2, count=2)
    assert soup.aggregate().epsilon == epsilon([expected], 1e-5)


def test_a_root_update_of_another_base_is_refused_before_any_contribution(tmp_path: Path) -> None:
    other = BaseSpec.of(nn.Linear(3, 3), "other")
    write_delta(tmp_path / "other.gymdelta", [DeltaEntry.of("weight", torch.ones(3, 3))], other)
    with pytest.raises(GymError) as caught:
        soup_of({}, method="fltrust", root=str(tmp_path / "other.gymdelta"))
    assert caught.value.code is ErrorCode.BASE_MISMATCH


def soup_norm(models: dict[str, Any]) -> float:
    """L2 norm of the first model's change."""
    return (
        change(soup_of({"one": next(iter(models.values()))}, method="mean"), min_contributors=1).norm().item()
    )


def test_a_contributor_contributes_once_and_the_base_is_named_once() -> None:
    soup = soup_of({"ada": tuned(1)})
    with pytest.raises(GymError, match="'ada' has contributed already"):
        soup.contribute(user_id="ada", model=tuned(2))
    with pytest.raises(GymError, match="base model once"):
        DeltaSoup(DeltaSoupConfig())
    assert isinstance(soup.spec, BaseSpec)
