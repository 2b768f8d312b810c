"""What every merge method must do; a file dropped into gym_fed/soup/methods is tested here by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import METHODS
from gym_fed.soup.building import build
from gym_fed.soup.method import MergeMethod, TensorTask

NAMES = METHODS.names()
NEED_STATISTICS = [name for name in NAMES if METHODS.type_of(name).statistics is not None]
DRAW = {"dare_linear", "dare_ties", "della"}
"""Methods whose draws belong to places in the list."""

ADD_UP = {"task_arithmetic", "breadcrumbs"}
"""Methods that add where others take a mean: equal deltas come out multiplied by their number."""


EVERYTHING: dict[str, dict[str, Any]] = {
    "ties": {"density": 1.0},
    "dare_linear": {"density": 1.0},
    "dare_ties": {"density": 1.0},
    "della": {"density": 1.0, "epsilon": 0.0},
    "breadcrumbs": {"smallest": 0.0, "largest": 0.0},
}


def method(name: str, count: int, **settings: Any) -> MergeMethod:
    """A method that, where it chooses among models, has chosen: all of them are as good."""
    built = build(METHODS.type_of(name), settings, "settings")
    if built.uses_score and count >= built.minimum:
        built.choose(torch.ones(count, dtype=torch.float64), score=lambda _: 0.0)
    return built


def task_of(name: str, deltas: torch.Tensor, weights: list[float] | None = None) -> TensorTask:
    count, _, cols = deltas.shape
    noise = torch.Generator().manual_seed(7)
    if name == "fisher":
        statistics = [torch.rand(deltas.shape[1:], generator=noise) for _ in range(count)]
    elif name == "regmean":
        inputs = torch.randn(count, 3 * cols, cols, generator=noise)
        statistics = [x.T @ x / len(x) for x in inputs]
    else:
        assert name not in NEED_STATISTICS, "say here what the new method's statistics look like"
        statistics = []
    exact = torch.tensor(weights or [1.0] * count, dtype=torch.float64)
    return TensorTask("layers.0.down", deltas, exact, statistics=tuple(statistics))


def deltas_of(count: int, rows: int = 6, cols: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, rows, cols, generator=torch.Generator().manual_seed(seed))


def test_the_methods_of_this_release_are_registered() -> None:
    assert set(NAMES) >= {
        *(
            "linear",
            "task_arithmetic",
            "ties",
            "dare_linear",
            "dare_ties",
            "della",
            "breadcrumbs",
            "model_stock",
        ),
        *("sce", "karcher", "fisher", "regmean", "greedy_soup"),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(6, 11), (1, 9), (1, 1), (5, 1)])
def test_the_result_is_one_float32_tensor_and_the_input_stays_as_it_was(
    name: str, shape: tuple[int, int]
) -> None:
    task = task_of(name, deltas_of(3, *shape))
    given = (task.deltas, task.weights, *task.statistics)
    before = [tensor.clone() for tensor in given]
    result = method(name, 3).merge_tensor(task)
    assert result.shape == shape
    assert result.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if METHODS.type_of(name).minimum == 1])
def test_a_single_delta_comes_out_as_itself_where_all_of_it_is_kept(name: str) -> None:
    task = task_of(name, deltas_of(1))
    result = method(name, 1, **EVERYTHING.get(name, {})).merge_tensor(task)
    torch.testing.assert_close(result, task.deltas[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_equal_deltas_come_out_equal(name: str) -> None:
    delta = deltas_of(1)
    result = method(name, 4, **EVERYTHING.get(name, {})).merge_tensor(task_of(name, delta.repeat(4, 1, 1)))
    torch.testing.assert_close(result, delta[0] * (4 if name in ADD_UP else 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_of_nothing(name: str) -> None:
    result = method(name, 3).merge_tensor(task_of(name, torch.zeros(3, 6, 11)))
    assert not bool(result.any())


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_one_model_left_alone_is_merged_all_the_same(name: str) -> None:
    deltas = deltas_of(3)
    deltas[1] = 0.0
    assert bool(torch.isfinite(method(name, 3).merge_tensor(task_of(name, deltas))).all())


@pytest.mark.parametrize("name", NAMES)
def test_scale_multiplies_the_result(name: str) -> None:
    task = task_of(name, deltas_of(3))
    once = method(name, 3).merge_tensor(task)
    assert torch.equal(method(name, 3, scale=-2.0).merge_tensor(task), -2.0 * once)


@pytest.mark.parametrize("name", NAMES)
def test_larger_deltas_give_a_larger_result(name: str) -> None:
    task = task_of(name, deltas_of(3))
    once = method(name, 3).merge_tensor(task)
    eightfold = method(name, 3).merge_tensor(replace(task, deltas=8.0 * task.deltas))
    torch.testing.assert_close(eightfold, 8.0 * once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DRAW])
def test_the_order_of_models_does_not_matter(name: str) -> None:
    weights = [1.0, 2.0, 0.5, 1.5] if METHODS.type_of(name).weighted else [1.0] * 4
    task, order = task_of(name, deltas_of(4), weights), [2, 0, 3, 1]
    shuffled = TensorTask(
        task.name,
        task.deltas[order],
        task.weights[order],
        statistics=tuple(task.statistics[i] for i in order if task.statistics),
    )
    torch.testing.assert_close(
        method(name, 4).merge_tensor(shuffled), method(name, 4).merge_tensor(task), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", sorted(DRAW))
def test_draws_follow_from_seed_and_tensor_alone(name: str) -> None:
    task = task_of(name, deltas_of(3, 40, 50))
    torch.manual_seed(1)
    first = method(name, 3, seed=5).merge_tensor(task)
    torch.manual_seed(2)
    assert torch.equal(method(name, 3, seed=5).merge_tensor(task), first)
    assert not torch.equal(method(name, 3, seed=6).merge_tensor(task), first)
    assert not torch.equal(method(name, 3, seed=5).merge_tensor(replace(task, name="other")), first)


@pytest.mark.parametrize("name", [name for name in NAMES if METHODS.type_of(name).weighted])
def test_a_heavier_model_is_heard_more(name: str) -> None:
    def distance(weights: list[float]) -> float:
        task = task_of(name, deltas_of(3, 40, 50), weights)
        merged = method(name, 3, **EVERYTHING.get(name, {})).merge_tensor(task)
        return float((merged / merged.norm() - task.deltas[1] / task.deltas[1].norm()).norm())

    assert distance([1.0, 20.0, 1.0]) < distance([1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", [name for name in NAMES if not METHODS.type_of(name).weighted])
def test_weights_are_refused_where_they_would_do_nothing(name: str) -> None:
    with pytest.raises(GymError, match="weights differ") as caught:
        method(name, 3).merge_tensor(task_of(name, deltas_of(3), [1.0, 2.0, 1.0]))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(name: str) -> None:
    task = task_of(name, deltas_of(3, 300, 257))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(method(name, 3).merge_tensor(task))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_with_tensor_and_model(name: str, bad: float) -> None:
    deltas = deltas_of(3)
    deltas[2, 1, 1] = bad
    with pytest.raises(GymError, match=r"'layers.0.down': update 2") as caught:
        method(name, 3).merge_tensor(task_of(name, deltas))
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


@pytest.mark.parametrize("name", NAMES)
def test_a_merge_that_overflows_is_refused(name: str) -> None:
    task = task_of(name, deltas_of(3).sign() * 1e38)
    with pytest.raises(GymError, match=r"'layers.0.down': the merge overflows") as caught:
        method(name, 3, scale=1e6).merge_tensor(replace(task, deltas=task.deltas[:1].repeat(3, 1, 1)))
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, float("nan"), 1.0]])
def test_weights_that_make_no_sense_are_refused(name: str, weights: list[float]) -> None:
    task = replace(task_of(name, deltas_of(3)), weights=torch.tensor(weights, dtype=torch.float64))
    if weights == [1.0, -1.0, 1.0] and method(name, 3).negates:
        first, second, third = task.deltas.double()
        merged = method(name, 3).merge_tensor(task)
        torch.testing.assert_close(merged, (first - second + third).float())
        return
    with pytest.raises(GymError) as caught:
        method(name, 3).merge_tensor(task)
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("name", NEED_STATISTICS)
def test_statistics_of_some_models_only_are_refused(name: str) -> None:
    task = task_of(name, deltas_of(3))
    with pytest.raises(GymError, match=f"{name}.*3 fine-tunes, not of 2") as caught:
        method(name, 3).merge_tensor(replace(task, statistics=task.statistics[:2]))
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("name", NEED_STATISTICS)
def test_tensors_without_statistics_are_refused_or_merged_as_the_method_says(name: str) -> None:
    task = replace(task_of(name, deltas_of(3)), statistics=())
    if METHODS.type_of(name).statistics_optional:
        built = method(name, 3)
        torch.testing.assert_close(built.merge_tensor(task), task.deltas.mean(dim=0))
        assert task.name in str(built.report())
    else:
        with pytest.raises(GymError, match="not of 0"):
            method(name, 3).merge_tensor(task)


@pytest.mark.parametrize("name", NEED_STATISTICS)
@pytest.mark.parametrize("bad", ["shape", "nan", "negative"])
def test_statistics_that_cannot_be_are_refused_with_the_model(name: str, bad: str) -> None:
    task = task_of(name, deltas_of(3))
    wrong = {
        "shape": torch.ones(5, 4),
        "nan": task.statistics[1] * float("nan"),
        "negative": -task.statistics[1],
    }[bad]
    with pytest.raises(GymError, match=r"'layers.0.down': .* 1 ") as caught:
        method(name, 3).merge_tensor(
            replace(task, statistics=(task.statistics[0], wrong, task.statistics[2]))
        )
    assert caught.value.code is ErrorCode.DATA_INVALID


@pytest.mark.parametrize("name", NAMES)
def test_malicious_clients_are_left_to_the_aggregators(name: str) -> None:
    with pytest.raises(GymError, match="withstand no malicious client"):
        method(name, 3, num_malicious_nodes=1)


@pytest.mark.parametrize("name", [name for name in NAMES if METHODS.type_of(name).minimum > 1])
def test_too_few_models_are_refused(name: str) -> None:
    few = METHODS.type_of(name).minimum - 1
    with pytest.raises(GymError, match="needs at least") as caught:
        method(name, few).merge_tensor(task_of(name, deltas_of(few)))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_a_method_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(GymError, match="colour: unknown key") as caught:
        method(name, 3, colour="red")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
