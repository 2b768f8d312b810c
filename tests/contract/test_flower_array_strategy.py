"""DeltaSoupStrategy where FedAvg would stand: the same answers where Flower has the rule, and no reply ends a run."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi
from gym_server.strategy import DeltaSoupStrategy

import gym_fed  # noqa: F401  (sets Flower's variables first)
from gym_fed.core.errors import ErrorCode, GymError
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


def packed(b: Array | None = None, **metrics: Mapping[str, Any]) -> Message:
    """A reply with array ``b`` and the metric records given."""
    arrays = {"w": Array(START["w"]), "b": b or Array(START["b"])}
    records = {name: MetricRecord(dict(values)) for name, values in metrics.items()}
    return Message(content=RecordDict({"arrays": ArrayRecord(arrays), **records}), reply_to=task(9))


def raw(
    data: bytes, dtype: str = "float32", shape: tuple[int, ...] = (3,), stype: str = "numpy.ndarray"
) -> Message:
    """A reply whose array ``b`` is these bytes."""
    return packed(Array(dtype=dtype, shape=shape, stype=stype, data=data), metrics={"num-examples": 1})


def npy(header: str, body: bytes = b"\0" * 12) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def described(shape: str, descr: str = "<f4") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}"


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("b.npy", npy(described("(3,)")))
    return buffer.getvalue()


BAD = {
    "no metric record": lambda: packed(),
    "two metric records": lambda: packed(metrics={"num-examples": 1}, more={"num-examples": 1}),
    "no number of examples": lambda: packed(metrics={"loss": 1.0}),
    "a list of numbers of examples": lambda: packed(metrics={"num-examples": [1, 2]}),
    "fewer than no examples": lambda: packed(metrics={"num-examples": -5}),
    "no examples": lambda: packed(metrics={"num-examples": 0}),
    "NaN examples": lambda: packed(metrics={"num-examples": float("nan")}),
    "a metric that no float holds": lambda: packed(metrics={"num-examples": 1, "loss": 10**400}),
    "a zip archive": lambda: raw(archive()),
    "a broken zip archive": lambda: raw(b"PK\3\4" + b"0" * 50),
    "no bytes": lambda: raw(b""),
    "a header of ten terabytes": lambda: raw(npy(described("(10000000000000,)"))),
    "a header of a negative size": lambda: raw(npy(described("(-1,)"))),
    "a header nine thousand deep": lambda: raw(npy("-" * 9000 + "1")),
    "a header that nests": lambda: raw(npy("[" * 900 + "]" * 900)),
    "a header of objects": lambda: raw(npy(described("(3,)", "|O"), b"\0" * 24)),
    "too few bytes": lambda: raw(npy(described("(3,)"), b"\0" * 11)),
    "too many bytes": lambda: raw(npy(described("(3,)"), b"\0" * 13)),
    "another dtype than it declares": lambda: raw(npy(described("(3,)", "<i4"))),
    "another shape than it declares": lambda: raw(npy(described("(3,)")), shape=(10**13,)),
    "a dtype that does not exist": lambda: raw(npy(described("(3,)")), dtype="(" * 500),
    "another serialisation": lambda: raw(npy(described("(3,)")), stype="pickle"),
    "complex numbers": lambda: reply({**START, "b": START["b"] + 1j}, 9),
    "time differences": lambda: reply({**START, "b": START["b"].astype("m8[s]")}, 9),
    "booleans": lambda: reply({**START, "b": START["b"] > 0}, 9),
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


def test_every_form_of_a_readable_array_reads_as_what_it_is() -> None:
    start = {
        "w": np.zeros((2, 3), np.float32),
        "scalar": np.float32(1.0),
        "empty": np.zeros((0, 3), np.float32),
    }
    strategy = DeltaSoupStrategy(aggregator="median", min_train_nodes=3)
    begin(strategy, start)
    values = np.arange(6, dtype=np.float64).reshape(2, 3) + 1
    forms = [values, np.asfortranarray(values)]
    forms += [values.astype(dtype) for dtype in (">f4", np.int8, np.float16)]
    found, _ = strategy.aggregate_train(1, [reply({**start, "w": a}, i) for i, a in enumerate(forms, 1)])
    assert found is not None
    np.testing.assert_array_equal(found["w"].numpy(), values)
    assert found["w"].numpy().dtype == np.float32
    assert found["scalar"].numpy() == 1.0
    assert found["empty"].numpy().shape == (0, 3)


def test_metrics_that_not_all_hold_alike_are_left_out_and_the_others_are_merged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    claimed = {"num-examples": 1, "loss": 2.0, "gone": 1.0, "list": [1.0, 3.0]}
    good = [packed(metrics=claimed) for _ in range(3)]
    odd = packed(other={"num-examples": 3, "loss": 4.0, "list": [1.0], "new": 1.0})
    _, metrics = robust().aggregate_train(1, [*good, odd])
    assert metrics is not None
    assert dict(metrics) == {"loss": pytest.approx(3.0)}
    assert "['gone', 'list', 'new']" in caplog.text


def test_a_metrics_function_of_ones_own_is_given_every_usable_reply_under_one_records_name() -> None:
    def total(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        return MetricRecord({"sum": sum(content["metrics"][weighted_by] for content in contents)})

    odd = packed(other={"num-examples": 5})
    good = [packed(metrics={"num-examples": 1}) for _ in range(3)]
    _, metrics = robust(train_metrics_aggr_fn=total).aggregate_train(1, [odd, *good])
    assert dict(metrics) == {"sum": 8}


def test_a_bad_reply_to_an_evaluation_is_left_out() -> None:
    good = [packed(metrics={"num-examples": 1, "loss": 2.0}) for _ in range(3)]
    bad = [packed(), packed(metrics={"num-examples": [1], "loss": 9.0}), error_reply(4)]
    assert dict(robust().aggregate_evaluate(1, [*bad, *good])) == {"loss": pytest.approx(2.0)}
    assert robust().aggregate_evaluate(1, bad) is None


def test_a_refusal_by_the_rules_leaves_the_round_and_the_moments_as_they_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise GymError(ErrorCode.INTERNAL, "no median")

    strategy = robust(server_optimizer="momentum")
    replies = [reply(arrays, node) for node, arrays in enumerate(fine_tunes(1, START), 1)]
    with monkeypatch.context() as patched:
        patched.setattr(type(strategy._pipeline.aggregator), "combine", refuses)
        assert strategy.aggregate_train(1, replies) == (None, None)
    assert "no median" in caplog.text
    found, _ = strategy.aggregate_train(1, replies)
    expected, _ = robust(server_optimizer="momentum").aggregate_train(1, replies)
    np.testing.assert_array_equal(found["w"].numpy(), expected["w"].numpy())


@pytest.mark.parametrize(("sent", "dtype"), [(6e4, np.float16), (200, np.uint8), (-(2.0**62), np.int64)])
def test_a_result_beyond_the_arrays_dtype_changes_nothing(
    sent: float, dtype: type[np.generic], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = DeltaSoupStrategy(aggregator="mean", norm_ratio=None, min_train_nodes=3)
    begin(strategy, {"w": np.full(4, sent, dtype)})
    wide = {"w": np.full(4, 6.0 * sent, np.float32)}
    assert strategy.aggregate_train(1, [reply(wide, i) for i in (1, 2, 3)]) == (None, None)
    assert "would leave the range of" in caplog.text


MASKED = {
    "w": np.zeros(3, np.float32),
    "mask": np.array([0.0, -np.inf, np.nan], np.float32),
    "flag": np.array([True, False]),
}


def test_bool_arrays_and_places_that_are_not_finite_stay_as_they_are() -> None:
    strategy = DeltaSoupStrategy(
        aggregator="byzantine_robust", num_malicious_nodes=1, server_optimizer="adam", min_train_nodes=3
    )
    begin(strategy, MASKED)
    tuned = [
        {**MASKED, "w": MASKED["w"] + 1 + 0.1 * i, "mask": MASKED["mask"] + np.float32(0.5)} for i in range(5)
    ]
    found, _ = strategy.aggregate_train(1, [reply(arrays, i) for i, arrays in enumerate(tuned, 1)])
    assert found is not None
    assert found["flag"].numpy().dtype == np.bool_
    np.testing.assert_array_equal(found["flag"].numpy(), MASKED["flag"])
    np.testing.assert_array_equal(found["mask"].numpy()[1:], MASKED["mask"][1:])
    assert found["mask"].numpy()[0] > 0
    assert (found["w"].numpy() > 0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"flag": np.array([True, True])},
        {"flag": np.array([1.0, 0.0])},
        {"mask": np.array([0.0, 7.0, np.nan], np.float32)},
        {"mask": np.array([0.0, np.inf, np.nan], np.float32)},
        {"mask": np.array([0.0, -np.inf, 0.0], np.float32)},
        {"mask": np.array([-np.inf, -np.inf, np.nan], np.float32)},
    ],
)
def test_a_reply_that_changes_what_must_stay_is_left_out(
    change: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = DeltaSoupStrategy(aggregator="mean", norm_ratio=None, min_train_nodes=3)
    begin(strategy, MASKED)
    bad = {**MASKED, "w": np.full(3, 9.0, np.float32), **change}
    replies = [reply(MASKED, 1), reply(MASKED, 2), reply(bad, 3), reply(MASKED, 4)]
    found, _ = strategy.aggregate_train(1, replies)
    assert "node 3 is left out" in caplog.text
    for key, sent in MASKED.items():
        np.testing.assert_array_equal(found[key].numpy(), sent)


def test_a_round_without_any_reply_changes_nothing() -> None:
    assert robust().aggregate_train(1, []) == (None, None)


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
    ("settings", "message"),
    [
        ({"aggregator": "krum", "num_malicious_nodes": 2, "min_train_nodes": 5}, "needs 7"),
        (
            {"aggregator": "krum", "num_malicious_nodes": 0, "num_examples_cap": 5, "min_train_nodes": 9},
            "one vote",
        ),
        ({"aggregator": "fltrust", "min_train_nodes": 5}, "coordinator"),
        ({"aggregator": "median", "pre_aggregators": ["nothing"]}, "unknown pre-aggregator"),
    ],
)
def test_rules_that_cannot_work_are_refused_before_the_first_round(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((GymError, ValueError), match=message) as caught:
        DeltaSoupStrategy(**settings)
    assert not isinstance(caught.value, GymError) or caught.value.code is ErrorCode.CONFIG_INVALID
