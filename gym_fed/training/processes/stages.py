"""Cut a model into consecutive blocks, the stages of a pipeline, and gather its weights again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted
from gym_fed.training.processes.group import world_size
from gym_fed.training.processes.sharding import same_outputs, settings_of

_HINT = "use distributed.strategy: fsdp2, or deepspeed with zero_stage: 3"


class _Skip(nn.Module):
    """A placeholder for a block or the last norm, if another process has it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        if hasattr(block, "attention_type"):
            self.attention_type = block.attention_type

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class _AbsentEmbedding(nn.Module):
    """A placeholder for an embedding or head that another process has; it has a shape but no data."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.weight = torch.empty(embedding.weight.shape, dtype=embedding.weight.dtype, device="meta")


@dataclass(frozen=True)
class _Parts:
    """The modules that are distributed: the decoder's embedding, blocks and last norm, and the model's head."""

    embedding: nn.Module
    blocks: nn.ModuleList
    norm: tuple[str, nn.Module]
    head: nn.Module


def balanced(costs: Sequence[float], stages: int) -> list[range]:
    """Divide blocks into consecutive non-empty ranges so that the largest sum of costs is minimal.

    Args:
        costs: Cost of each block; the first cost includes the embedding, the last one the norm and the head.
        stages: Number of ranges, at most the number of blocks.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[s][n]: the largest cost if the first n blocks are in s + 1 stages, and the block at which the last stage
    # begins.
    best: list[list[tuple[float, int]]] = [[(total, 0) for total in sums]]
    for stage in range(1, stages):
        row: list[tuple[float, int]] = []
        for end in range(len(sums)):
            splits = [(max(best[-1][n][0], sums[end] - sums[n]), n) for n in range(stage, end)]
            row.append(min(splits, default=(float("inf"), 0)))
        best.append(row)
    ranges, end = [], len(costs)
    for row in reversed(best):
        ranges.append(range(row[end][1], end))
        end = row[end][1]
    return ranges[::-1]


class ModelStages:
    """A causal LM that is cut into as many stages as there are processes; each process keeps one.

    Stages are numbered from the last process, so that the main process has the head.

    Args:
        model: The causal LM, or a PEFT model around it.
        config: The run's config.

    Attributes:
        names: For each saved weight of the model or its adapter, the process that holds it, its shape and its dtype.
            Tied weights are listed once.

    Raises:
        GymError: ``MODEL_INVALID`` with the class of the model, if it cannot be cut or a stage has nothing to train.
    """

    def __init__(self, model: Any, config: TrainingConfig) -> None:
        self.model = model
        self.is_adapter = hasattr(model, "peft_config")
        self.base = model.get_base_model() if self.is_adapter else model
        self.decoder = self.base.base_model
        self.size, self.rank = world_size(), dist.get_rank()
        self.stage = self.size - 1 - self.rank
        self._parts = self._find_parts()
        self._ranges = balanced(self._costs(), self.size)
        self.names = self._owners()
        self._require_same_outputs()
        self._require_trained()
        embedding, head = self._parts.embedding, self._parts.head
        self._is_tied = getattr(embedding, "weight", None) is getattr(head, "weight", False)
        self._tied: Any = None
        self._tied_name = ""
        if self._is_tied and not self.is_adapter:
            address = embedding.weight.data_ptr()  # type: ignore[operator]
            self._tied_name = next(
                name for name, value in self._saved().items() if value.data_ptr() == address
            )
        timeout = timedelta(seconds=settings_of(config).timeout_seconds)
        self._ends = dist.new_group([0, self.size - 1], timeout=timeout)

    @property
    def is_first(self) -> bool:
        """True if this process has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this process has the head; this is always the main process."""
        return self.stage == self.size - 1

    def cut(self) -> None:
        """Drop the weights of the other stages."""
        self._keep(self.stage)
        if not self.is_first:
            self.base.set_input_embeddings(_AbsentEmbedding(self._parts.embedding))
        if not self.is_last:
            self.base.set_output_embeddings(_AbsentEmbedding(self._parts.head))
        if self._is_tied and self.is_first:
            self._tied = self._parts.embedding.weight
        elif self._is_tied and self.is_last:
            self._tied = self._parts.head.weight
        del self._parts  # the last reference to the dropped modules

    def forward(self, arguments: dict[str, Any], hidden: torch.Tensor | None) -> torch.Tensor:
        """Run this stage's blocks on ``hidden`` ``[n, length, width]``, None in the first stage; same output shape."""
        if hidden is not None:
            arguments = {**arguments, "input_ids": None, "inputs_embeds": hidden}
        arguments = {**arguments, "use_cache": False}
        out: torch.Tensor = type(self.decoder).forward(self.decoder, **arguments).last_hidden_state
        return out

    def add_tied_gradients(self) -> None:
        """Sum the gradients of a weight that is both embedding and head, after the backward passes of a step."""
        if self._tied is None or not self._tied.requires_grad:
            return
        if self._tied.grad is None:
            self._tied.grad = torch.zeros_like(self._tied)
        dist.all_reduce(self._tied.grad, group=self._ends)

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the gradients of all stages; tied weights are counted once."""
        counted_once = self._tied if self.is_last and not self.is_first else None
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None and p is not counted_once]
        square = torch.nn.utils.get_total_norm(gradients).to(self.device).float() ** 2
        dist.all_reduce(square)
        return square.sqrt()

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return the saved state of all stages on the CPU of the main process; empty in the other processes."""
        own, gathered = self._saved(), {}
        for name, (owner, shape, dtype) in self.names.items():
            if owner == self.rank != 0:
                dist.send(own[name].contiguous(), 0)
            elif self.rank == 0:
                value = own[name] if owner == 0 else torch.empty(shape, dtype=dtype, device=self.device)
                if owner != 0:
                    dist.recv(value, owner)
                gathered[name] = value.cpu()
        return gathered

    @property
    def optimizer_file(self) -> str:
        """The name of the file in a checkpoint that contains the optimiser state of this stage."""
        return f"optimizer_{self.rank}.pt"

    def load(self, folder: Path) -> None:
        """Load this stage's weights, or its part of an adapter, from a checkpoint of the whole model.

        Raises:
            GymError: ``MODEL_INVALID`` if a weight is missing from the checkpoint.
        """
        if self.is_adapter:
            from peft import set_peft_model_state_dict

            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                set_peft_model_state_dict(self.model, {name: file.get_tensor(name) for name in self._saved()})
            return
        own = self.model.state_dict(keep_vars=True)
        missing = {name: own[name] for name, (owner, *_) in self.names.items() if owner == self.rank}
        if self._tied is not None:
            missing[self._tied_name] = self._tied
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name in missing.keys() & set(file.keys()):
                    missing.pop(name).copy_(file.get_tensor(name))
        reason = f"{folder} lacks {counted(len(missing), 'weight')} of the model, such as {next(iter(missing), '')}"
        remedy = "delete the checkpoint, or start again in another output_dir"
        refuse_first((missing, reason, remedy), code=ErrorCode.MODEL_INVALID)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def _find_parts(self) -> _Parts:
        decoder, base = self.decoder, self.base
        number = getattr(base.config, "num_hidden_layers", None)
        stacks = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == number]
        embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
        others = [
            (name, module)
            for name, module in decoder.named_children()
            if module is not embedding
            and module not in stacks
            and next(module.parameters(), None) is not None
        ]
        self._refuse(
            (
                len(stacks) != 1 or embedding is None or head is None,
                "is not a sequence of embedding, blocks and head",
            ),
            (len(others) != 1, "has weights besides embedding, blocks, one norm and head"),
            (
                getattr(base.config, "output_router_logits", False),
                "adds auxiliary losses of its blocks (output_router_logits)",
            ),
            (
                len(stacks) == 1 and len(stacks[0]) < self.size,
                f"has {counted(number or 0, 'block')}, fewer than the {counted(self.size, 'process')}",
            ),
        )
        return _Parts(embedding, stacks[0], others[0], head)

    def _refuse(self, *refusals: Any) -> None:
        refuse_first(*refusals, code=ErrorCode.MODEL_INVALID, prefix=_reason(self.base), remedy=_HINT)

    def _costs(self) -> list[float]:
        """Return each block's bytes, with gradients and two moments; ``balanced`` defines the first and the last."""

        def bytes_of(*modules: nn.Module) -> float:
            weights = {p for module in modules for p in module.parameters()}
            return float(sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in weights))

        parts = self._parts
        costs = [bytes_of(block) for block in parts.blocks]
        costs[0] += bytes_of(parts.embedding)
        costs[-1] += bytes_of(parts.norm[1], parts.head)
        return costs

    def _modules_of(self, stage: int) -> list[nn.Module]:
        parts = self._parts
        modules = [parts.blocks[index] for index in self._ranges[stage]]
        modules += [parts.embedding] if stage == 0 else []
        return modules + ([parts.norm[1], parts.head] if stage == self.size - 1 else [])

    def _saved(self) -> dict[str, torch.Tensor]:
        """Return this process's part of the saved state, by the names in the saved file."""
        if not self.is_adapter:
            return dict(self.model.state_dict())
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(self.model, save_embedding_layers=False))

    def _owners(self) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
        ranks: dict[int, int] = {}
        for stage in range(self.size):
            for module in self._modules_of(stage):
                for value in module.state_dict().values():
                    ranks.setdefault(value.data_ptr(), self.size - 1 - stage)
        owners, seen = {}, set()
        for name, value in self._saved().items():
            address = value.data_ptr()
            self._refuse((address not in ranks, f"has {name}, which belongs to no stage"))
            if address not in seen:
                owners[name] = (ranks[address], value.shape, value.dtype)
            seen.add(address)
        return owners

    def _keep(self, stage: int) -> None:
        """Replace the blocks and the norm of all other stages with placeholders."""
        for index, block in enumerate(self._parts.blocks):
            if index not in self._ranges[stage]:
                self._parts.blocks[index] = _Skip(block)
        if stage != self.size - 1:
            name, norm = self._parts.norm
            setattr(self.decoder, name, _Skip(norm))

    @contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """Keep only the blocks and the norm of one stage within a context."""
        blocks, (name, norm) = list(self._parts.blocks), self._parts.norm
        try:
            self._keep(stage)
            yield
        finally:
            setattr(self.decoder, name, norm)
            for index, block in enumerate(blocks):
                self._parts.blocks[index] = block

    def _require_same_outputs(self) -> None:
        """Refuse a decoder whose stages, run in order, give different outputs from the whole model."""
        ids = torch.arange(8, device=self.base.device)[None] % self.base.config.vocab_size
        was_training = self.model.training
        self.model.eval()
        hidden = None
        try:
            with torch.no_grad():
                whole = self.decoder(input_ids=ids, use_cache=False).last_hidden_state.float()
                for stage in range(self.size):
                    with self._only(stage):
                        hidden = self.forward({"input_ids": ids}, hidden)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            reason = f"{_reason(self.base)}fails when its blocks are run in parts: {error}"
            raise GymError(ErrorCode.MODEL_INVALID, reason, _HINT) from error
        finally:
            self.model.train(was_training)
        assert hidden is not None  # there is at least one stage
        is_same = same_outputs(hidden.float(), whole, self.base.dtype)
        self._refuse((not is_same, "has different outputs when its blocks are run in parts"))

    def _require_trained(self) -> None:
        for stage in range(self.size):
            trains = any(p.requires_grad for module in self._modules_of(stage) for p in module.parameters())
            first, last = self._ranges[stage].start, self._ranges[stage].stop - 1
            reason = f"has no trained weights in blocks {first} to {last}, the stage of one process"
            self._refuse((not trains, reason, "use fewer processes, or ddp"))


def _reason(model: Any) -> str:
    return f"distributed.strategy: pipeline_parallel: {type(model).__name__} "
