"""The two sides of ``flowertune.py``: a Flower app like FlowerTune's, and the project's updates, rule and soups."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _flowertune import CLIENTS, FRACTION, REVERSED, SAMPLED, STEPS, Federation, reversed_update
from _row_evidence import row_evidence
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

import gym_fed.core.library_env  # noqa: F401  (sets Flower's environment before its first import)
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.factors import lora_factors
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.gram import RowEvidence
from gym_fed.soup.merging import merge

LOWEST = 1 / 50
"""Final learning rate of FlowerTune's cosine schedule, as a fraction of the initial one."""
DECAY = 0.9
"""Our ``rounds.learning_rate_decay``, since the hub has no cosine schedule over rounds."""
UPDATE = CodecPolicy(factors="auto")


@dataclass
class Course:
    """The result of a run: held-out loss after some rounds, and the bytes of each client's message up and down."""

    losses: dict[int, float] = field(default_factory=dict)
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    rejected: int = 0
    """Number of rounds without a soup."""


def flower(federation: Federation, rate: float, every: int) -> Course:
    """Run Flower's FedAvg with its messages and a ``ClientApp``, as in FlowerTune's template.

    Messages are serialised and parsed in this process instead of being sent over HTTP; their bytes are counted.
    """
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity

    logging.getLogger("flwr").setLevel(logging.WARNING)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    plan, model, course = federation.plan, federation.model, Course()
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays: Any = message.content["arrays"]
        start = arrays.to_torch_state_dict()
        set_peft_model_state_dict(model, start)
        server_round, client = int(message.content["config"]["server-round"]), context.node_id  # type: ignore[arg-type]
        share = LOWEST + (1 - LOWEST) / 2 * (1 + math.cos(math.pi * server_round / plan.rounds))
        rows = federation.data[client]
        federation.train(rows, rate * share, server_round, client)
        tuned = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
        if client in plan.malicious:
            tuned = {name: reversed_update(start[name], tensor) for name, tensor in tuned.items()}
        content = RecordDict(
            {"arrays": ArrayRecord(tuned), "metrics": MetricRecord({"num-examples": len(rows)})}
        )
        return Message(content, reply_to=message)

    class LocalGrid(Grid):
        """Runs the app of each node in this process."""

        def __init__(self) -> None:
            self.sampled: list[list[int]] = []

        def set_run(self, run: Run) -> None:
            raise NotImplementedError

        @property
        def run(self) -> Run:
            return Run.create_empty(1)

        def create_message(
            self,
            content: RecordDict,
            message_type: str,
            dst_node_id: int,
            group_id: str,
            ttl: float | None = None,
        ) -> Message:
            return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

        def get_node_ids(self) -> Iterable[int]:
            return range(1, CLIENTS + 1)

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            raise NotImplementedError

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            raise NotImplementedError

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            replies = []
            sent = [message for message in messages if message.metadata.message_type == "train"]
            for message in sent:
                message.metadata.__dict__["_message_id"] = f"to-{message.metadata.dst_node_id}"
                wire = message_to_proto(message).SerializeToString()
                course.down.append(len(wire))
                arrived = message_from_proto(ProtoMessage.FromString(wire))
                node = message.metadata.dst_node_id
                reply = app(arrived, Context(1, node, {}, RecordDict(), {}))
                reply.metadata.__dict__["_message_id"] = f"from-{node}"
                wire = message_to_proto(reply).SerializeToString()
                course.up.append(len(wire))
                replies.append(message_from_proto(ProtoMessage.FromString(wire)))
            if sent:
                self.sampled.append([message.metadata.dst_node_id for message in sent])
            return replies

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round % every == 0:
            set_peft_model_state_dict(model, arrays.to_torch_state_dict())
            course.losses[server_round] = federation.loss()

    federation.start_lora(plan.seed + 1)
    initial = ArrayRecord({name: t.clone() for name, t in get_peft_model_state_dict(model).items()})
    strategy = FedAvg(fraction_train=FRACTION, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    grid = LocalGrid()
    random.seed(plan.seed)
    strategy.start(grid, initial, plan.rounds, train_config=ConfigRecord(), evaluate_fn=evaluate)
    assert grid.sampled == plan.sampled, "Flower sampled other clients"
    assert len(course.up) == len(course.down) == SAMPLED * plan.rounds
    assert federation.trained_steps == STEPS * SAMPLED * plan.rounds
    return course


def gym(federation: Federation, rate: float, soup_rank: int, every: int) -> Course:
    """Run the project's rounds: quantised factors with error feedback, the default rule with clean rows, and soups.

    A client downloads all soups since its last round. The hub trains one update on its own rows per round.
    """
    plan, course = federation.plan, Course()
    recipe = SoupRecipe(
        aggregator="byzantine_evidence", codec=CodecPolicy(codec="lora", lora_rank=soup_rank, factors="auto")
    )
    bases: dict[str, Tensor] = {
        f"{name}.weight": federation.model.get_base_model().get_submodule(name).get_base_layer().weight
        for name in federation.layers
    }
    version = {name: weight.detach().to(torch.float32, copy=True) for name, weight in bases.items()}
    spec = BaseSpec.of(version, federation.setup.model.name)
    lineage, last = spec.digest, dict.fromkeys(range(1, CLIENTS + 1), 0)
    soups: list[int] = []

    def load(change: dict[str, Tensor] | None = None) -> None:
        """Load the current version into the model, plus an optional change, and reset B."""
        for name, weight in bases.items():
            weight.data.copy_(version[name] if change is None else version[name] + change[name])
        federation.start_lora(plan.seed + server_round)

    with tempfile.TemporaryDirectory(prefix="gym-flowertune-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        feedback = ErrorFeedback.load(folder / "soup.residual", lineage)
        server_round = 1
        load()
        course.losses[0] = federation.loss()
        for server_round, sampled in enumerate(plan.sampled, 1):
            round_rate = rate * DECAY ** (server_round - 1)
            paths = []
            for client in sampled:
                course.down.append(sum(soups[last[client] :]))
                last[client] = len(soups)
                load()
                federation.train(federation.data[client], round_rate, server_round, client)
                factors = lora_factors(federation.model)
                paths.append(folder / f"{server_round}-{client}.gymdelta")
                if client in plan.malicious:
                    factors = {name: (a, REVERSED * b, scale) for name, (a, b, scale) in factors.items()}
                    policy, residual = UPDATE.model_copy(update={"error_feedback": False}), None
                else:
                    policy = UPDATE
                    residual = ErrorFeedback.load(folder / f"{client}.residual", lineage)
                lora_delta(factors, paths[-1], spec, policy=policy, residual=residual)
                if residual is not None:
                    residual.save()
                course.up.append(paths[-1].stat().st_size)
            load()
            federation.train(federation.root, round_rate, server_round, 0)
            lora_delta(lora_factors(federation.model), folder / "root.gymdelta", spec)
            own = stack.enter_context(DeltaFile.open(folder / "root.gymdelta", spec))
            updates = [stack.enter_context(DeltaFile.open(path, spec)) for path in paths]
            out = folder / f"soup-{server_round}.gymdelta"
            try:
                evidence = evidence_on(federation, load, updates, recipe, spec, own)
                merge(updates, [1.0] * SAMPLED, recipe, out, spec, feedback, root=own, evidence=evidence)
            except GymError as error:
                if error.code is not ErrorCode.UPDATE_REFUSED:
                    raise
                course.rejected += 1
            else:
                soups.append(out.stat().st_size)
                feedback.save()
                with DeltaFile.open(out, spec) as soup:
                    for name in soup.names:
                        version[name] += soup.decode(name)
            stack.close()
            load()
            if server_round % every == 0:
                course.losses[server_round] = federation.loss()
        assert len(course.up) == len(course.down) == SAMPLED * plan.rounds
        assert federation.trained_steps == STEPS * (SAMPLED + 1) * plan.rounds
    return course


def evidence_on(
    federation: Federation,
    load: Any,
    updates: list[DeltaFile],
    recipe: SoupRecipe,
    spec: BaseSpec,
    own: DeltaFile,
) -> RowEvidence:
    """Measure the length evidence on the hub's rows, as the hub does."""

    def measured(shares: list[float]) -> float:
        change = {name: torch.zeros(spec.shapes[name]) for name in spec.shapes}
        for update, share in zip(updates, shares, strict=True):
            for name in update.names if share else ():
                change[name] += share * update.decode(name)
        load(change)
        return federation.loss(federation.root)

    return row_evidence(updates, recipe, spec, own, measured)
