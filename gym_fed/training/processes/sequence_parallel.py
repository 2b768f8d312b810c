"""Sequence parallelism: split the tokens of each row over processes (Jacobs et al. 2023, "DeepSpeed Ulysses").

The processes of a group have the same rows, and each runs the decoder on its part of the tokens. Attention needs all
tokens of a row, but only one head at a time. An all-to-all gives each process all tokens of its share of the heads, and
a second one returns the outputs. The decoder's outputs are gathered, so that a loss reads whole rows: no label is lost
at a border, and every algorithm has the same loss and metrics as with one process. The activations of the blocks, which
take most of the memory for long rows, are divided by the size of the group.

DDP averages gradients over all processes. The gradient of a block is a sum over the parts of a row, so the gather
multiplies it by the size of the group in the backward pass. The gradient of the head is the same in every process of a
group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted
from gym_fed.training.processes.sharding import is_placed, same_outputs, sequence_parallel_size, settings_of

NAME = "gym_sequence_parallel"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_HINT = "use distributed.strategy: ddp or fsdp2, with gradient_checkpointing: true for long rows"
_groups: dict[int, Any] = {}


class _Exchange(torch.autograd.Function):
    """Send block ``i`` of ``[size, ...]`` to process ``i`` of the group, and receive block ``i`` from it."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(blocks: torch.Tensor, group: Any) -> torch.Tensor:
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=group)
    return received


class _Gather(torch.autograd.Function):
    """Join the parts ``[n, part, ...]`` of all processes. The gradient is this process's part, times their number."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.size, ctx.index = dist.get_world_size(group), dist.get_rank(group)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ctx.size)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].chunk(ctx.size, dim=1)[ctx.index] * ctx.size, None


def heads_of_tokens(states: torch.Tensor, group: Any) -> torch.Tensor:
    """Exchange ``[n, heads, part, d]``, a part of the tokens, for ``[n, heads / size, length, d]``."""
    size = dist.get_world_size(group)
    n, heads, part, width = states.shape
    blocks = states.view(n, size, heads // size, part, width).movedim(1, 0)
    received: torch.Tensor = _Exchange.apply(blocks, group)  # type: ignore[no-untyped-call]
    return received.permute(1, 2, 0, 3, 4).reshape(n, heads // size, size * part, width)


def tokens_of_heads(states: torch.Tensor, group: Any) -> torch.Tensor:
    """Exchange ``[n, heads / size, length, d]`` for ``[n, heads, part, d]``: the inverse of ``heads_of_tokens``."""
    size = dist.get_world_size(group)
    n, heads, length, width = states.shape
    blocks = states.reshape(n, heads, size, length // size, width).movedim(2, 0)
    received: torch.Tensor = _Exchange.apply(blocks, group)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).reshape(n, size * heads, length // size, width)


@dataclass(frozen=True)
class _Grouped:
    """The attributes that transformers' attention reads from a module: query heads per key head, and causality."""

    num_key_value_groups: int
    is_causal: bool


class RowSplitter:
    """Splits the rows of a decoder over the processes, with hooks around its forward pass and its attention.

    Calls with a cache (generation) are not split; every process computes whole rows.
    """

    def __init__(self, decoder: Any, group: Any) -> None:
        self.decoder = decoder
        self.group = group
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.is_on = True
        self.calls = 0
        self._is_cached = False
        self._length = 0

    @property
    def _splits(self) -> bool:
        return self.is_on and not self._is_cached

    def before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Replace the inputs ``[n, length]`` with this process's part, its global positions, and the whole mask."""
        self._is_cached = bool(kwargs.get("use_cache")) or kwargs.get("past_key_values") is not None
        if not self._splits:
            return args, kwargs
        ids = kwargs.get("input_ids")
        if args or ids is None:
            reason = _reason(self.decoder, "is not called with input_ids")
            raise GymError(ErrorCode.MODEL_INVALID, reason, _HINT)
        self._length = ids.shape[1]
        padding = -self._length % self.size
        ids = torch.nn.functional.pad(ids, (0, padding))
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(self._length, device=ids.device)[None]
        # Padding at the end continues the last sequence, whose tokens cannot attend to it.
        rest = positions[:, -1:] + torch.arange(1, padding + 1, device=ids.device)
        positions = torch.cat((positions, rest), dim=1)
        mask = _without_right_padding(kwargs.get("attention_mask"))
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, padding))
        own = ids.shape[1] // self.size
        part = slice(self.index * own, (self.index + 1) * own)
        return (), {
            **kwargs,
            "input_ids": ids[:, part],
            "position_ids": positions[:, part],
            "attention_mask": self._whole_mask(ids, positions, mask),
            "use_cache": False,
        }

    def after(self, module: Any, args: Any, output: Any) -> Any:
        """Gather the decoder's outputs from all processes, and drop the padding."""
        if self._splits:
            part = output.last_hidden_state
            whole: torch.Tensor = _Gather.apply(part, self.group)  # type: ignore[no-untyped-call]
            output.last_hidden_state = whole[:, : self._length]
        self._is_cached = False
        return output

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of queries ``[n, heads, part, d]``; return outputs ``[n, part, heads, d]``."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self.calls += 1
        unsupported = [key for key in _UNSUPPORTED if kwargs.get(key) is not None]
        if unsupported:
            reason = f"uses the attention implementation {', '.join(unsupported)}"
            raise GymError(ErrorCode.MODEL_INVALID, _reason(self.decoder, reason), _HINT)
        if not self._splits:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        repeats = self.size // math.gcd(self.size, key.shape[1])
        if repeats > 1:  # there are fewer key heads than processes
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        query, key, value = (heads_of_tokens(states, self.group) for states in (query, key, value))
        if attention_mask is not None and attention_mask.shape[1] > 1:
            attention_mask = attention_mask.chunk(self.size, dim=1)[self.index]
        grouped: Any = _Grouped(query.shape[1] // key.shape[1], getattr(module, "is_causal", True))
        out, _ = sdpa_attention_forward(grouped, query, key, value, attention_mask, **kwargs)
        return tokens_of_heads(out.transpose(1, 2), self.group).transpose(1, 2).contiguous(), None

    def _whole_mask(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """Return the mask for whole rows as the model creates it: a tensor, one tensor per layer type, or None."""
        from transformers.masking_utils import create_masks_for_generate

        like = torch.empty((*ids.shape, 0), dtype=self.decoder.dtype, device=ids.device)
        return create_masks_for_generate(self.decoder.config, like, mask, None, positions)


def _without_right_padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask ``[n, length]``; None if rows are padded only at the end, where no token attends to the padding."""
    if mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return None
    return mask


@contextmanager
def sequence_parallel(model: Any, config: TrainingConfig) -> Iterator[RowSplitter | None]:
    """Split the rows of a causal LM within a context if the config requires it; yield the splitter or None."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    size = sequence_parallel_size(config)
    if size == 1:
        yield None
        return
    split = RowSplitter(model.base_model, _group(size, settings_of(config).timeout_seconds))

    # Functions rather than methods, since a deep copy of the model (a reference) must not copy the group.
    def before(module: Any, args: Any, kwargs: Any) -> Any:
        return split.before(module, args, kwargs)

    def after(module: Any, args: Any, output: Any) -> Any:
        return split.after(module, args, output)

    def attend(*args: Any, **kwargs: Any) -> Any:
        return split.attend(*args, **kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    former = model.config._attn_implementation
    handles = (
        model.base_model.register_forward_pre_hook(before, with_kwargs=True),
        model.base_model.register_forward_hook(after),
    )
    try:
        model.set_attn_implementation(NAME)
        yield split
    finally:
        model.set_attn_implementation(former)
        for handle in handles:
            handle.remove()


def place(model: Any, config: TrainingConfig, device: Any) -> Any:
    """Return a loaded causal LM on its device, after checking that its rows can be split if the config requires it.

    Raises:
        GymError: See ``require_splittable``.
    """
    model = model if is_placed(model, config) else model.to(device)
    require_splittable(model, config)
    return model


def require_splittable(model: Any, config: TrainingConfig) -> None:
    """Refuse a model whose rows cannot be split, by comparing forward passes with and without splitting.

    Every process must call it, with the model on its device.

    Raises:
        GymError: ``MODEL_INVALID`` naming the model's class and the reason.
    """
    size = sequence_parallel_size(config)
    if size == 1:
        return
    heads = getattr(model.config, "num_attention_heads", None)
    routers = getattr(model.config, "output_router_logits", False)
    refuse_first(
        (not isinstance(heads, int), "has no single number of attention heads, or reads more than text"),
        (
            isinstance(heads, int) and heads % size,
            f"has {counted(heads or 0, 'attention head')}, which cannot be divided evenly among "
            f"{counted(size, 'process')}",
            "set distributed.sequence_parallel_size to a divisor of both the heads and the processes",
        ),
        (routers, "balances its experts over whole rows (output_router_logits)"),
        code=ErrorCode.MODEL_INVALID,
        prefix=_reason(model, ""),
        remedy=_HINT,
    )
    ids = torch.arange(4 * size + 1, device=model.device)[None] % model.config.vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), sequence_parallel(model, config) as split:
            assert split is not None
            parts = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
            calls, split.calls = split.calls, 0
            split.is_on = False
            whole = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise
        reason = _reason(model, f"fails on a part of a row: {error}")
        raise GymError(ErrorCode.MODEL_INVALID, reason, _HINT) from error
    finally:
        model.train(was_training)
    is_same = calls and same_outputs(parts, whole, model.dtype)
    reason = "has different outputs when rows are split: its blocks read earlier tokens outside the attention"
    refuse_first((not is_same, _reason(model, reason), _HINT), code=ErrorCode.MODEL_INVALID)


def _reason(model: Any, why: str) -> str:
    return f"distributed.strategy: sequence_parallel: {type(model).__name__} {why}"


def _group(size: int, timeout_seconds: float) -> Any:
    """Return the group of ``size`` consecutive processes to which this one belongs; created only once."""
    if size not in _groups:
        timeout = timedelta(seconds=timeout_seconds)
        _groups[size], _ = dist.new_subgroups(size, timeout=timeout)  # type: ignore[no-untyped-call]
    return _groups[size]
