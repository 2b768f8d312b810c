"""Training sections with a different layout in other tools, and ``batch_size``, the rows of an optimiser step."""

from __future__ import annotations

import os
from typing import Any

from gym_fed.core.text import counted
from gym_fed.interop.draft import Draft, KeyAlias, Unsupported

_MAX_AT_ONCE = 8
"""Maximum number of rows per device if the config sets none; the default of ``per_device_train_batch_size``."""


def split_batch(total: int, processes: int, at_once: int | None) -> tuple[int, int] | None:
    """Return rows per device and accumulation steps whose product with ``processes`` is ``total``.

    Args:
        total: Rows of one optimiser step on all devices.
        processes: Number of devices.
        at_once: Rows per device; None for the largest divisor up to 8.

    Returns:
        The two numbers; None if no integers satisfy this.
    """
    each, rest = divmod(total, processes)
    if rest or each < 1:
        return None
    if at_once is None:
        at_once = max(size for size in range(1, _MAX_AT_ONCE + 1) if each % size == 0)
    return None if each % at_once else (at_once, each // at_once)


def batch_size(draft: Draft) -> None:
    """Split ``batch_size``, the rows of an optimiser step, into rows per device and accumulation steps."""
    total = draft.get("batch_size")
    accumulated = draft.get("gradient_accumulation_steps")
    try:
        processes = int(draft.get("distributed.world_size") or os.environ.get("WORLD_SIZE") or 1)
        total = int(total)
        at_once = draft.get("per_device_train_batch_size")
        if at_once is None and accumulated is not None:
            each, rest = divmod(total, processes * int(accumulated))
            sizes = None if rest else (each, int(accumulated))
        else:
            sizes = split_batch(total, processes, None if at_once is None else int(at_once))
    except (TypeError, ValueError):
        raise draft.problem("batch_size", f"{total!r} is not a number of rows") from None
    if sizes is None:
        raise draft.problem(
            "batch_size",
            f"{counted(total, 'row')} of a step cannot be divided evenly (processes: {processes}, "
            f"per_device_train_batch_size: {at_once or 'free'}, gradient_accumulation_steps: {accumulated or 'free'})",
            "use per_device_train_batch_size and gradient_accumulation_steps instead",
        )
    draft.take("batch_size")
    draft.put("per_device_train_batch_size", sizes[0], "batch_size")
    draft.put("gradient_accumulation_steps", sizes[1], "batch_size")
    times = f" x {processes} processes" if processes > 1 else ""
    draft.note(
        "batch_size",
        f"`per_device_train_batch_size: {sizes[0]}` x `gradient_accumulation_steps: {sizes[1]}`{times}",
    )


def near_batch(value: Any) -> str:
    """Return what to write instead of ``batch_size: value``."""
    sizes = split_batch(value, 1, None) if isinstance(value, int) and value > 0 else None
    if sizes is None:
        return "did you mean 'per_device_train_batch_size'?"
    return (
        f"did you mean 'per_device_train_batch_size'? A step has that many rows per device times "
        f"gradient_accumulation_steps: {sizes[0]} and {sizes[1]} on one device"
    )


_CUBLAS = (":4096:8", ":16:8")

_SHARDED = {"full_shard": "fsdp2", "shard_grad_op": "deepspeed", "no_shard": "ddp"}
"""gym-fed's strategies by FSDP's sharding strategies; ZeRO-2 shards gradients and optimiser state only."""


def _strategy(draft: Draft) -> None:
    draft.take("distributed.strategy")
    draft.put("distributed.strategy", "fsdp2", "distributed.strategy")
    draft.note("distributed.strategy: fsdp", "`fsdp2`", "distributed.strategy")


def _sharding(draft: Draft) -> None:
    key = "distributed.sharding_strategy"
    word, strategy = str(draft.get(key)).lower(), draft.get("distributed.strategy")
    remedy = (
        "for full_shard use strategy fsdp2, for shard_grad_op deepspeed with zero_stage 2, for no_shard ddp"
    )
    if word not in _SHARDED:
        raise draft.problem(key, f"{word!r} is not supported", remedy)
    if strategy not in (None, "fsdp2", "fsdp"):
        raise draft.problem(key, f"{word} cannot be combined with strategy {strategy}", remedy)
    draft.take(key)
    if word != "full_shard" and strategy is not None:
        draft.take("distributed.strategy")
    draft.put("distributed.strategy", _SHARDED[word], key)
    draft.note(f"{key}: {word}", f"`strategy: {_SHARDED[word]}`", key)


_MODEL_KEYS = {
    "num_layers": "num_hidden_layers", "n_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "n_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size", "max_seq_len": "max_position_embeddings",
}  # fmt: skip


def _model(draft: Draft) -> None:
    given: dict[str, Any] = draft.take("model")
    words = {_MODEL_KEYS.get(key, key): (key, value) for key, value in given.items()}
    for key, (origin, value) in words.items():
        draft.put(f"model_init.{key}", value, f"model.{origin}")
    hidden, heads = draft.get("model_init.hidden_size"), draft.get("model_init.num_attention_heads")
    are_valid = isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0
    if are_valid and not hidden % heads:
        _fill(draft, "num_key_value_heads", heads)
        _fill(draft, "head_dim", hidden // heads)
    if isinstance(hidden, int):
        _fill(draft, "intermediate_size", -(-8 * hidden // 3 // 256) * 256 if hidden >= 256 else 4 * hidden)
    if draft.get("finetuning") is None:
        draft.put("finetuning", "full", "model")
    draft.note("model: {architecture: ...}", "`model_init`", "model")


def _fill(draft: Draft, key: str, value: int) -> None:
    """Set a size that the config omits to Llama's default."""
    if draft.get(f"model_init.{key}") is None:
        draft.put(f"model_init.{key}", value, "model")


def _training(draft: Draft) -> None:
    for key in list(draft.get("training")):
        draft.put(key, draft.take(f"training.{key}"), f"training.{key}")
    draft.note("training", "not a section; its keys are at the top level")
    if draft.get("batch_size") is not None:
        batch_size(draft)


def _cublas(draft: Draft) -> None:
    key = "reproducibility.cublas_workspace_config"
    if (value := draft.get(key)) not in _CUBLAS:
        problem = f"{value!r} does not make cuBLAS deterministic"
        raise draft.problem(key, problem, "write ':4096:8' or ':16:8', in quotes")
    draft.move(key, "reproducibility.cublas_workspace")


SECTIONS = [
    KeyAlias(
        "training",
        "its keys, at the top level",
        _training,
        lambda value: isinstance(value, dict),
        "training: {batch_size, learning_rate, max_steps}",
    ),
    KeyAlias(
        "model",
        "`model_init`",
        _model,
        lambda value: isinstance(value, dict),
        "model: {architecture: llama, hidden_size, num_layers, num_heads, vocab_size}",
    ),
    KeyAlias(
        "distributed.strategy",
        "`fsdp2`",
        _strategy,
        lambda value: value == "fsdp",
        "distributed.strategy: fsdp",
    ),
    KeyAlias("distributed.sharding_strategy", "`strategy: fsdp2` (full_shard)", _sharding),
    KeyAlias("distributed.mixed_precision", "mixed_precision"),
    KeyAlias("distributed.gradient_checkpointing", "gradient_checkpointing"),
    KeyAlias("reproducibility.seed", "seed"),
    KeyAlias("reproducibility.deterministic_algorithms", "reproducibility.deterministic"),
    KeyAlias("reproducibility.cublas_workspace_config", "`reproducibility.cublas_workspace`", _cublas),
    KeyAlias(
        "serving",
        "",
        refusal=Unsupported(
            "serving options belong in a serving config",
            ("gym api serving.yaml", "cache_size: 10GB"),
        ),
        shown="serving: in a training config",
    ),
]
