"""DeltaSoup for stock Flower apps: clients send arrays as for FedAvg, and the server merges them robustly.

    from gym_server.strategy import DeltaSoupStrategy

    strategy = DeltaSoupStrategy(aggregator="byzantine_robust", num_malicious_nodes=2, min_train_nodes=8)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3)

Everything else is Flower's FedAvg: sampling, messages, evaluation, and the mean of metrics that all replies contain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from gym_quant.kernels import products
from torch import Tensor

from gym_fed.config.hub.soup import Option, SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.building import build_optimizer
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.optimizer import OptimizerState
from gym_fed.soup.pipeline import Pipeline
from gym_fed.soup.screening import screen_norms
from gym_fed.soup.stacks import BLOCK_ELEMENTS, mixed
from gym_server.strategy.untrusted import comparable, read_array, read_metrics

log = logging.getLogger("gym_server")
T = TypeVar("T")

_MIN_FOR_NORM_SCREEN = 3
_COMFORTABLE = 1e15


@dataclass(frozen=True)
class _Reply:
    """A usable reply: the change of each array by key, without bool arrays, which cannot change."""

    node_id: int
    content: Any
    deltas: Mapping[str, np.ndarray]
    norm: float
    num_examples: int


class DeltaSoupStrategy(FedAvg):
    """FedAvg with DeltaSoup's aggregation rules instead of the weighted mean.

    An unusable reply (an error, other keys or shapes, bytes that are not an array, non-finite values, no
    ``num-examples``, a norm far above the median) is skipped and logged. A round that is too small for the rules, or
    whose result does not fit the arrays' dtypes, changes nothing and is logged. Neither ends the run.

    Float and integer arrays are merged. Bool arrays, and elements where the model itself is not finite (a mask of
    ``-inf``), are kept unchanged; a reply with other values there is unusable.

    Args:
        aggregator: Name of an aggregation rule in ``gym_fed/soup/aggregators``.
        aggregator_options: Further keys of its ``Config``.
        pre_aggregators: Names of rules in ``gym_fed/soup/pre_aggregators``, in the order in which they run.
        pre_aggregator_options: Further keys of their ``Config``, by name.
        num_malicious_nodes: Number f of malicious (Byzantine) clients to withstand.
        max_norm: L2 norm to which larger updates are scaled down; None disables it.
        norm_ratio: Updates with a norm above this multiple of the median norm are skipped; None keeps all.
        num_examples_cap: Cap on the claimed number of examples, which is an update's weight; None for equal weights.
        server_optimizer: ``none``, ``momentum``, ``nesterov``, ``adam`` or ``yogi``.
        server_optimizer_options: Further keys of its ``Config``.
        server_learning_rate: Factor by which the step is multiplied.
        fedavg: Keyword arguments of Flower's ``FedAvg``: ``min_train_nodes``, ``fraction_train``, ...

    Raises:
        GymError: ``CONFIG_INVALID`` for rules that do not exist or need more than ``min_train_nodes`` replies.
    """

    def __init__(
        self,
        *,
        aggregator: str = "byzantine_robust",
        aggregator_options: Mapping[str, Option] | None = None,
        pre_aggregators: Sequence[str] = (),
        pre_aggregator_options: Mapping[str, dict[str, Option]] | None = None,
        num_malicious_nodes: int = 0,
        max_norm: float | None = None,
        norm_ratio: float | None = 4.0,
        num_examples_cap: int | None = None,
        server_optimizer: str = "none",
        server_optimizer_options: Mapping[str, Option] | None = None,
        server_learning_rate: float = 1.0,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self.recipe = SoupRecipe(
            aggregator=aggregator,
            aggregator_options=dict(aggregator_options or {}),
            pre_aggregators=list(pre_aggregators),
            pre_aggregator_options=dict(pre_aggregator_options or {}),
            num_malicious_nodes=num_malicious_nodes,
            max_norm=max_norm,
            weighting="uniform" if num_examples_cap is None else "num_examples",
            num_examples_cap=num_examples_cap,
            server_optimizer=server_optimizer,
            server_optimizer_options=dict(server_optimizer_options or {}),
            server_learning_rate=server_learning_rate,
        )
        self._pipeline = Pipeline.of(self.recipe)
        if self._pipeline.needs is Needs.ROOT:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"aggregator {aggregator!r} needs the coordinator's own update, which a Flower app does not have",
                "use the hub with root: {data: ...}, or another aggregator",
            )
        self._pipeline.check(torch.ones(self.min_train_nodes))
        self._optimizer = build_optimizer(self.recipe)
        self._state = OptimizerState()
        self._norm_ratio = norm_ratio
        self._current: dict[str, np.ndarray] = {}

    def summary(self) -> None:
        """Log the rules, then FedAvg's settings."""
        steps = " > ".join([*self.recipe.pre_aggregators, self.recipe.aggregator])
        log.info("DeltaSoup: %s against %d malicious clients", steps, self.recipe.num_malicious_nodes)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure training as FedAvg does, and store the arrays, since updates are computed relative to them."""
        self._current = {key: array.numpy() for key, array in arrays.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the usable replies.

        Returns:
            The new arrays and the metrics that all replies contain; (None, None) if the round changes nothing.
        """
        usable = self._screened(list(_usable(replies, self._read)))
        weights = torch.tensor(
            self.recipe.weights([reply.num_examples for reply in usable]), dtype=torch.float64
        )
        try:
            self._pipeline.check(weights)
            plan = self._plan(usable, weights)
            arrays = ArrayRecord({key: Array(self._merged(key, usable, plan)) for key in self._current})
        except GymError as error:
            log.warning("round %d changes nothing: %s", server_round, error)
            return None, None
        self._state.advance()
        contents = comparable([reply.content for reply in usable])
        return arrays, self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Merge the metrics that all usable replies contain.

        Returns:
            The metrics; None if no reply is usable.
        """
        contents = list(_usable(replies, self._read_metrics))
        return self.evaluate_metrics_aggr_fn(comparable(contents), self.weighted_by_key) if contents else None

    def _read_metrics(self, reply: Message) -> RecordDict:
        read_metrics(reply.content, self.weighted_by_key)
        return reply.content

    def _read(self, reply: Message) -> _Reply:
        claimed = self._num_examples(reply)
        found = reply.content.array_records.get(self.arrayrecord_key)
        if found is None or set(found) != set(self._current):
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"its arrays do not match those that were sent under {self.arrayrecord_key!r}",
            )
        deltas = {}
        for key, sent in self._current.items():
            array = read_array(key, found[key], sent)
            kept = _kept(sent)
            if not np.array_equal(array[kept], sent[kept], equal_nan=sent.dtype.kind == "f"):
                raise GymError(
                    ErrorCode.UPDATE_REFUSED,
                    f"array {key!r} changes values that are bool or not finite, which must stay the same",
                )
            if sent.dtype.kind == "b":
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                delta = np.asarray((array.astype(np.float64) - sent).astype(np.float32))
            delta[kept] = 0.0
            if not np.isfinite(delta).all():
                raise GymError(ErrorCode.UPDATE_REFUSED, f"array {key!r} contains values that are not finite")
            deltas[key] = delta.reshape(-1)
        norm = float(np.sqrt(sum(float(np.square(d, dtype=np.float64).sum()) for d in deltas.values())))
        return _Reply(reply.metadata.src_node_id, reply.content, deltas, norm, claimed)

    def _num_examples(self, reply: Message) -> int:
        """Return the claimed number of examples if it is the weight, else 1; the metrics' mean always requires it."""
        claimed = read_metrics(reply.content, self.weighted_by_key)
        if self.recipe.num_examples_cap is None:
            return 1
        if claimed < 1:
            raise GymError(ErrorCode.UPDATE_REFUSED, f"it reports no {self.weighted_by_key!r} of at least 1")
        return int(min(claimed, self.recipe.num_examples_cap))

    def _screened(self, usable: list[_Reply]) -> list[_Reply]:
        if self._norm_ratio is None or len(usable) < _MIN_FOR_NORM_SCREEN:
            return usable
        verdicts = screen_norms([reply.norm for reply in usable], self._norm_ratio)
        for reply, verdict in zip(usable, verdicts, strict=True):
            if not verdict.accepted:
                log.warning("node %d is left out: %s", reply.node_id, verdict.reason)
        return [reply for reply, verdict in zip(usable, verdicts, strict=True) if verdict.accepted]

    def _plan(self, usable: Sequence[_Reply], weights: Tensor) -> CombinationWeights:
        norms = torch.tensor([reply.norm for reply in usable], dtype=torch.float64)
        if self._pipeline.needs >= Needs.PRODUCTS:
            scales = torch.where(norms > _COMFORTABLE, 1.0 / norms.clamp_min(1.0), torch.ones_like(norms))
            found = torch.zeros(len(usable), len(usable), dtype=torch.float64)
            for key in usable[0].deltas:
                for _, block in _blocks([reply.deltas[key] for reply in usable]):
                    products(
                        (block * scales[:, None]).float() if bool((scales < 1).any()) else block, out=found
                    )
            found = found / scales[:, None] / scales[None]
        else:
            found = torch.diag(norms * norms)
        limit = self.recipe.max_norm
        clips = torch.ones_like(norms) if limit is None else (limit / norms).clamp_max(1.0)
        clipping = CombinationWeights.scaled(clips, weights)
        return self._pipeline.plan(GramMatrix(found, weights).combined(clipping)).after(clipping)

    def _merged(self, key: str, usable: Sequence[_Reply], plan: CombinationWeights) -> np.ndarray:
        """Return the merged array, in the dtype that was sent.

        Raises:
            GymError: ``UPDATE_REFUSED`` if the result does not fit that dtype; errors from the rules.
        """
        sent = self._current[key]
        if sent.dtype.kind == "b":
            return sent
        merged = torch.empty(sent.size)
        for start, block in _blocks([reply.deltas[key] for reply in usable]):
            part = self._pipeline.aggregator.combine(mixed(block, plan.matrix), plan.weights)
            merged[start : start + len(part)] = part
        if self._optimizer is not None:
            merged = self._optimizer.step(key, merged, self._state)
        change = merged.numpy().astype(np.float64).reshape(sent.shape) * self.recipe.server_learning_rate
        kept = _kept(sent)
        with np.errstate(over="ignore", invalid="ignore"):
            fresh = np.asarray(sent + change)
            if sent.dtype.kind != "f":
                fresh = np.rint(fresh)
            made = np.asarray(fresh.astype(sent.dtype))
            # An integer that does not fit wraps around, which a round trip reveals; a float becomes infinite.
            held = np.isfinite(made) if sent.dtype.kind == "f" else made.astype(np.float64) == fresh
        if not (held | kept).all():
            raise GymError(ErrorCode.UPDATE_REFUSED, f"array {key!r} would leave the range of {sent.dtype}")
        made[kept] = sent[kept]
        return made


def _usable(replies: Iterable[Message], read: Callable[[Message], T]) -> Iterator[T]:
    """Yield the result of ``read`` for each reply; error replies and refused ones are logged and skipped."""
    for reply in replies:
        node_id = reply.metadata.src_node_id
        if reply.has_error():
            log.warning("node %d: %s", node_id, reply.error.reason)
            continue
        try:
            found = read(reply)
        except GymError as error:
            log.warning("node %d is left out: %s", node_id, error)
        else:
            yield found


def _kept(sent: np.ndarray) -> np.ndarray:
    """Return a bool mask, in the shape of ``sent``, of the elements that never change: bool or non-finite ones."""
    return np.ones(sent.shape, np.bool_) if sent.dtype.kind == "b" else np.asarray(~np.isfinite(sent))


def _blocks(rows: Sequence[np.ndarray]) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, [n, block] float32)`` over flat arrays of equal size."""
    size = rows[0].size
    step = max(1, BLOCK_ELEMENTS // len(rows))
    for start in range(0, size, step):
        yield start, torch.from_numpy(np.stack([row[start : start + step] for row in rows]))
