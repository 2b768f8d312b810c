"""A thread pool for long work, such as reading objects and judging updates, so that short calls need not wait."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_HEAVY = ThreadPoolExecutor(4, "heavy")


async def heavily(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function like ``asyncio.to_thread``, but on the pool for long work."""
    context = contextvars.copy_context()
    work = partial(context.run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_HEAVY, work)
