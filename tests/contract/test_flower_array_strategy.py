"""DeltaSoupStrategy where FedAvg would stand: the same answers where Flower has the rule, and no reply ends a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi
from gym_server.strategy import DeltaSoupStrategy

import gym_fed  # noqa: F401  (sets Flower's variables first)
from gym_fed.errors import ErrorCode, GymError
from tests.support.flower_replies import begin, reply, task

START = {"w": np.arange(6, dtype=np.float32).reshape(2, 3) / 10, "b": np.ones(3, np.float32)}
QUIET = {"min_train_nodes": 5, "min_available_nodes": 5}


def fine_tunes(seed: int, start: dict[str, np.ndarray], count: int = 5) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            key: (value + 0.1 * rng.standard_normal(value.shape)).astype(np.float32)
            for key, value in start.items()
        }
        for _ in range(count)
    ]


def rounds(strategy: Any, count: int) -> list[dict[str, np.ndarray]]:
    """The arrays after each of ``count`` rounds."""
    arrays, seen = START, []
    for server_round in range(1, count + 1):
        begin(strategy, arrays, server_round)
        replies = [
            reply(a, node, num_examples=10 * node)
            for node, a in enumerate(fine_tunes(server_round, arrays), 1)
        ]
        found, _ = strategy.aggregate_train(server_round, replies)
        arrays = {key: array.numpy() for key, array in found.items()}
        seen.append(arrays)
    return seen


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (FedAvg, {}),
        (lambda **k: FedAvgM(server_momentum=0.9, **k), {"server_optimizer": "momentum"}),
        (
            lambda **k: FedAvgM(server_momentum=0.5, server_learning_rate=0.3, **k),
            {
                "server_optimizer": "momentum",
                "server_optimizer_options": {"momentum": 0.5},
                "server_learning_rate": 0.3,
            },
        ),
        (
            lambda **k: FedYogi(eta=0.05, beta_1=0.8, beta_2=0.95, tau=1e-2, **k),
            {
                "server_optimizer": "yogi",
                "server_optimizer_options": {"beta_1": 0.8, "beta_2": 0.95, "tau": 1e-2},
                "server_learning_rate": 0.05,
            },
        ),
        (
            lambda **k: FedAdam(eta=0.05, beta_1=0.8, beta_2=0.95, tau=1e-2, **k),
            {
                "server_optimizer": "adam",
                "server_optimizer_options": {"beta_1": 0.8, "beta_2": 0.95, "tau": 1e-2},
                "server_learning_rate": 0.05,
            },
        ),
    ],
    ids=["fedavg", "fedavgm", "fedavgm-slow", "fedyogi", "fedadam"],
)
def test_weighted_mean_and_server_optimisers_walk_where_flowers_do(theirs: Any, ours: dict[str, Any]) -> None:
    peer = theirs(**QUIET)
    strategy = DeltaSoupStrategy(
        aggregator="weighted_mean", num_examples_cap=1000, norm_ratio=None, **ours, **QUIET
    )
    for expected, found in zip(rounds(peer, 4), rounds(strategy, 4), strict=True):
        for key in START:
            np.testing.assert_allclose(found[key], expected[key], rtol=2e-5, atol=2e-6)


def robust(**changes: Any) -> DeltaSoupStrategy:
    strategy = DeltaSoupStrategy(aggregator="median", num_malicious_nodes=1, min_train_nodes=3, **changes)
    begin(strategy, START)
    return strategy


def error_reply(node_id: int) -> Message:
    return Message(Error(code=1, reason="out of memory"), reply_to=task(node_id))


BAD = {
    "an error": lambda: error_reply(9),
    "NaN": lambda: reply({**START, "b": np.full(3, np.nan, np.float32)}, 9),
    "infinity": lambda: reply({**START, "b": np.full(3, np.inf, np.float32)}, 9),
    "another shape": lambda: reply({**START, "b": np.ones(4, np.float32)}, 9),
    "a missing key": lambda: reply({"w": START["w"]}, 9),
    "one key too many": lambda: reply({**START, "c": np.ones(1)}, 9),
    "text": lambda: reply({**START, "b": np.array(["a", "b", "c"])}, 9),
    "a norm beyond all others": lambda: reply({**START, "b": np.full(3, 1e30, np.float32)}, 9),
}


@pytest.mark.parametrize("what", BAD)
def test_one_bad_reply_is_left_out_and_the_round_goes_on(what: str) -> None:
    good = [reply(arrays, node) for node, arrays in enumerate(fine_tunes(1, START), 1)]
    expected, _ = robust().aggregate_train(1, good)
    found, metrics = robust().aggregate_train(1, [good[0], BAD[what](), *good[1:]])
    assert metrics is not None
    for key in START:
        np.testing.assert_array_equal(found[key].numpy(), expected[key].numpy())


def test_a_round_too_small_for_the_rule_changes_nothing_and_does_not_raise() -> None:
    assert robust().aggregate_train(1, [reply(START, 1), error_reply(2), error_reply(3)]) == (None, None)


def test_the_number_of_examples_counts_up_to_the_cap_only() -> None:
    strategy = DeltaSoupStrategy(
        aggregator="weighted_mean", num_examples_cap=100, norm_ratio=None, min_train_nodes=2
    )
    begin(strategy, START)
    near, far = ({key: value + step for key, value in START.items()} for step in (1.0, 5.0))
    found, _ = strategy.aggregate_train(1, [reply(near, 1, 100), reply(far, 2, 10**9)])
    np.testing.assert_allclose(found["b"].numpy(), START["b"] + 3.0)


def test_arrays_of_whole_numbers_and_half_precision_keep_their_kind() -> None:
    start = {"steps": np.array([10], np.int64), "w": np.ones(4, np.float16)}
    strategy = DeltaSoupStrategy(aggregator="median", min_train_nodes=3)
    begin(strategy, start)
    tuned = [{"steps": np.array([12 + i], np.int64), "w": np.full(4, 1.5 + i, np.float16)} for i in range(3)]
    found, _ = strategy.aggregate_train(1, [reply(arrays, i) for i, arrays in enumerate(tuned, 1)])
    assert found["steps"].numpy().dtype == np.int64
    assert found["steps"].numpy().tolist() == [13]
    assert found["w"].numpy().dtype == np.float16
    assert found["w"].numpy().tolist() == [2.5] * 4


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"aggregator": "krum", "num_malicious_nodes": 2, "min_train_nodes": 5}, "takes 7"),
        (
            {"aggregator": "krum", "num_malicious_nodes": 0, "num_examples_cap": 5, "min_train_nodes": 9},
            "one vote",
        ),
        ({"aggregator": "fltrust", "min_train_nodes": 5}, "coordinator"),
        ({"aggregator": "median", "pre_aggregators": ["nothing"]}, "unknown pre-aggregator"),
    ],
)
def test_rules_that_cannot_work_are_refused_before_the_first_round(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises((GymError, ValueError), match=told) as caught:
        DeltaSoupStrategy(**settings)
    assert not isinstance(caught.value, GymError) or caught.value.code is ErrorCode.CONFIG_INVALID
