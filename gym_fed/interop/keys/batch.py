"""``batch_size`` of other tools: the rows of an optimizer step over all devices."""

from __future__ import annotations

import os
from typing import Any

from gym_fed.interop.keys.draft import Draft

_MOST_AT_ONCE = 8
"""Rows of a device at once where the config does not say: the default of ``per_device_train_batch_size``."""


def split_batch(total: int, processes: int, at_once: int | None) -> tuple[int, int] | None:
    """Rows of a device at once and steps of accumulation whose product with ``processes`` is ``total``.

    Args:
        total: Rows of one optimiser step, on all devices.
        processes: Devices.
        at_once: Rows of a device at once, where they are given; else the most up to 8 that divide.

    Returns:
        None where no whole numbers do it.
    """
    each, left = divmod(total, processes)
    if left or each < 1:
        return None
    if at_once is None:
        at_once = max(size for size in range(1, _MOST_AT_ONCE + 1) if each % size == 0)
    return None if each % at_once else (at_once, each // at_once)


def batch_size(draft: Draft) -> None:
    """Split ``batch_size``, the rows of an optimiser step, into devices and accumulation."""
    total = draft.get("batch_size")
    accumulated = draft.get("gradient_accumulation_steps")
    try:
        processes = int(draft.get("distributed.world_size") or os.environ.get("WORLD_SIZE") or 1)
        total = int(total)
        at_once = draft.get("per_device_train_batch_size")
        if at_once is None and accumulated is not None:
            each, left = divmod(total, processes * int(accumulated))
            sizes = None if left else (each, int(accumulated))
        else:
            sizes = split_batch(total, processes, None if at_once is None else int(at_once))
    except (TypeError, ValueError):
        raise draft.problem("batch_size", f"{total!r} is no whole number of rows") from None
    if sizes is None:
        raise draft.problem(
            "batch_size",
            f"{total} rows of a step cannot be shared out evenly (processes: {processes}, "
            f"per_device_train_batch_size: {at_once or 'free'}, gradient_accumulation_steps: {accumulated or 'free'})",
            "give per_device_train_batch_size and gradient_accumulation_steps instead",
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
        f"did you mean 'per_device_train_batch_size'? A step has that many rows a device, times "
        f"gradient_accumulation_steps: {sizes[0]} and {sizes[1]} on one device"
    )
