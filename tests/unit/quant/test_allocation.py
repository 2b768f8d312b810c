"""Bits under a byte budget: the hull, the budget, and how near to the best of all choices."""

from __future__ import annotations

import itertools

from gym_quant.allocation import allocate, hull
from hypothesis import given
from hypothesis import strategies as st

option = st.tuples(st.integers(0, 60), st.floats(0, 100, allow_nan=False))
tensors = st.dictionaries(st.sampled_from("abcde"), st.lists(option, min_size=1, max_size=4), min_size=1)


def test_the_hull_leaves_out_what_costs_more_and_is_no_better() -> None:
    assert hull([(8, 1.0), (1, 9.0), (4, 9.5), (2, 8.9), (3, 2.0)]) == [1, 4, 0]


def test_of_equally_large_options_the_better_counts() -> None:
    assert hull([(4, 3.0), (4, 1.0), (2, 5.0)]) == [2, 1]
    assert hull([(4, 3.0), (4, 1.0)]) == [1]


def test_bytes_go_where_they_remove_the_most_error() -> None:
    options = {"loud": [(1, 100.0), (2, 10.0), (4, 1.0)], "quiet": [(1, 3.0), (2, 0.3), (4, 0.1)]}
    assert allocate(options, 3) == {"loud": 1, "quiet": 0}
    assert allocate(options, 5) == {"loud": 2, "quiet": 0}
    assert allocate(options, 8) == {"loud": 2, "quiet": 2}


def test_a_budget_below_the_smallest_options_has_no_answer() -> None:
    assert allocate({"a": [(2, 1.0)], "b": [(3, 1.0)]}, 4) is None


@given(tensors, st.integers(0, 200))
def test_the_choice_fits_and_is_within_one_step_of_the_hull_of_the_best_of_all(
    options: dict[str, list[tuple[int, float]]], budget: int
) -> None:
    names = sorted(options)
    errors = [
        sum(options[n][i][1] for n, i in zip(names, picks, strict=True))
        for picks in itertools.product(*(range(len(options[n])) for n in names))
        if sum(options[n][i][0] for n, i in zip(names, picks, strict=True)) <= budget
    ]
    chosen = allocate(options, budget)
    if chosen is None:
        assert errors == []
        return
    assert sum(options[n][chosen[n]][0] for n in names) <= budget
    found = sum(options[n][chosen[n]][1] for n in names)
    steps = [
        options[n][here][1] - options[n][there][1]
        for n in names
        for here, there in itertools.pairwise(hull(options[n]))
    ]
    assert min(errors) - 1e-9 <= found <= min(errors) + max(steps, default=0.0) + 1e-9


@given(tensors)
def test_with_bytes_for_everything_every_tensor_gets_its_least_error(
    options: dict[str, list[tuple[int, float]]],
) -> None:
    chosen = allocate(options, 10**6)
    assert chosen is not None
    for name, found in options.items():
        assert found[chosen[name]][1] == min(error for _, error in found)


@given(tensors, st.integers(0, 200), st.integers(0, 9))
def test_a_whole_file_keeps_to_its_budget_and_more_tries_never_lose_more(
    options: dict[str, list[tuple[int, float]]], budget: int, header: int
) -> None:
    """Each tensor that is not as small as can be takes a line of the header."""
    least = {name: hull(found)[0] for name, found in options.items()}

    def size(picks: dict[str, int]) -> int:
        lines = sum(header for name, index in picks.items() if index != least[name])
        return lines + sum(options[name][index][0] for name, index in picks.items())

    lost = []
    for tries in (1, 3):
        chosen = allocate(options, budget, size, tries)
        assert (chosen is None) == (size(least) > budget)
        if chosen is not None:
            assert size(chosen) <= budget
            lost.append(sum(options[n][i][1] for n, i in chosen.items()))
    assert not lost or lost[1] <= lost[0] + 1e-9


def test_a_large_tensor_that_lacks_a_few_bytes_stays_where_a_small_one_can_go() -> None:
    options = {"table": [(0, 90.0), (100, 0.0)], **{f"layer{i}": [(0, 10.0), (10, 0.0)] for i in range(5)}}
    assert allocate(options, 145, tries=1) == {"table": 0, **dict.fromkeys(list(options)[1:], 1)}
    found = allocate(options, 145, tries=2)
    assert found is not None
    assert found["table"] == 1
    assert sum(found.values()) == 5
