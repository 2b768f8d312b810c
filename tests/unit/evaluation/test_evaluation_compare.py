"""Two runs compared row by row: against all resamples counted out, scipy, and what a reader would expect."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from gym_fed.core.errors import GymError
from gym_fed.evaluation.compare import compare_results, exact_mcnemar, paired_difference
from tests.support.evaluations import answer_task, choice_task, results_of


@pytest.mark.parametrize(
    ("only_first", "only_second"), [(0, 0), (1, 0), (5, 5), (3, 12), (40, 25), (900, 1000)]
)
def test_mcnemar_equals_the_exact_binomial_test(only_first: int, only_second: int) -> None:
    total = only_first + only_second
    expected = stats.binomtest(only_first, total).pvalue if total else 1.0
    assert exact_mcnemar(only_first, only_second) == pytest.approx(min(1.0, expected), rel=1e-9)


def test_the_bootstrap_equals_the_count_of_all_resamples() -> None:
    first, second = [1.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 0.25, 0.75, 0.5]
    differences = np.subtract(first, second)
    means = np.array([np.mean(one) for one in itertools.product(differences, repeat=5)])
    found = paired_difference(first, second, resamples=200_000, confidence=0.9)
    assert found.difference == pytest.approx(differences.mean())
    assert [found.lower, found.upper] == pytest.approx(list(np.quantile(means, [0.05, 0.95])), abs=0.01)
    far = np.mean(np.abs(means - differences.mean()) >= abs(differences.mean()) - 1e-12)
    assert found.p_value == pytest.approx(far, abs=0.005)


def test_many_rows_give_the_interval_and_p_of_the_paired_t_test() -> None:
    generator = np.random.default_rng(3)
    second = generator.normal(size=800)
    first = second + generator.normal(0.05, 0.5, size=800)
    found = paired_difference(list(first), list(second))
    expected = stats.ttest_rel(first, second)
    low, high = expected.confidence_interval(0.95)
    assert found.stderr == pytest.approx((first - second).std(ddof=1) / math.sqrt(800))
    assert [found.lower, found.upper] == pytest.approx([low, high], abs=0.003)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)


def test_intervals_cover_the_true_difference_as_often_as_they_say() -> None:
    generator, covered = np.random.default_rng(5), 0
    for seed in range(200):
        first = (generator.random(200) < 0.6).astype(float)
        second = (generator.random(200) < 0.5).astype(float)
        found = paired_difference(list(first), list(second), resamples=500, seed=seed)
        covered += found.lower <= 0.1 <= found.upper
    assert 0.89 <= covered / 200 <= 0.99


def test_accuracies_are_compared_by_the_rows_that_one_alone_has_right() -> None:
    ours = results_of(choice_task("wet", [True] * 9 + [False]))
    theirs = results_of(choice_task("wet", [True] * 2 + [False] * 7 + [True]), model="other")
    compared = compare_results(ours, theirs).tasks["wet"]
    found = compared.metrics["acc"]
    assert (found.first_only, found.second_only) == (7, 1)
    assert found.mcnemar_p == pytest.approx(stats.binomtest(7, 8).pvalue)
    assert found.difference == pytest.approx(0.6)
    assert compared.first["acc"], compared.second["acc"] == (0.9, 0.3)


def test_a_run_compared_with_itself_differs_by_nothing() -> None:
    run = results_of(choice_task("wet", [True, False] * 20))
    found = compare_results(run, run).tasks["wet"].metrics["acc"]
    assert (found.difference, found.lower, found.upper, found.p_value, found.mcnemar_p) == (0, 0, 0, 1, 1)


def test_values_that_are_no_accuracies_have_no_mcnemar() -> None:
    assert paired_difference([0.5, 1.0], [0.0, 1.0]).mcnemar_p is None


def test_unequal_rows_are_refused_and_shared_ones_counted() -> None:
    ours = results_of(choice_task("wet", [True] * 6))
    theirs = results_of(choice_task("wet", [False] * 6, first_row=2))
    with pytest.raises(GymError, match="share 4 rows; 2 are only in the first, 2 only in the second"):
        compare_results(ours, theirs)
    compared = compare_results(ours, theirs, shared_only=True).tasks["wet"]
    assert (compared.only_first, compared.only_second, compared.metrics["acc"].num_samples) == (2, 2, 4)


def test_rows_that_stand_twice_are_paired_in_their_order() -> None:
    one = choice_task("wet", [True, False])
    twice = type(one)(one.task, one.version, 0, one.figures, (*one.samples, one.samples[0]), one.lock)
    compared = compare_results(results_of(twice), results_of(twice)).tasks["wet"]
    assert compared.metrics["acc"].num_samples == 3
    with pytest.raises(GymError, match="1 are only in the first"):
        compare_results(results_of(twice), results_of(one))


def test_runs_without_a_common_task_are_refused_and_single_tasks_named() -> None:
    with pytest.raises(GymError, match="no task in common: wet and sums"):
        compare_results(results_of(choice_task("wet", [True])), results_of(answer_task("sums", ["4"])))
    both = results_of(choice_task("wet", [True]), answer_task("sums", ["4"]))
    assert compare_results(both, results_of(answer_task("sums", ["5"]))).missing == ("wet",)


def test_a_difference_that_no_resample_reaches_has_a_p_of_one_in_all_of_them() -> None:
    found = paired_difference([1.0] * 50, [0.0] * 50, resamples=100)
    assert found.p_value == pytest.approx(1 / 101)
