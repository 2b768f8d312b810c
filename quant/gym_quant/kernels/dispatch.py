"""Choose the kernel path: the best instruction set of this processor, or the user's choice."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gym_quant.errors import CodecError
from gym_quant.kernels import native

VARIABLE = "GYM_KERNELS"
PATHS = ("avx512", "avx2", "scalar", "torch")

_forced: ContextVar[str | None] = ContextVar("gym_kernels_path", default=None)


def available() -> tuple[str, ...]:
    """Return the kernel paths that this machine supports, fastest first; ``torch`` is always included."""
    return _paths(native.features())


def path() -> str:
    """Return the active kernel path: ``avx512``, ``avx2``, ``scalar`` or ``torch``.

    Raises:
        CodecError: If ``GYM_KERNELS`` names an unknown path, or one that this machine does not support.
    """
    forced = _forced.get()
    if forced is not None:
        return forced
    forced = os.environ.get(VARIABLE, "")
    return _checked(forced, f"environment variable {VARIABLE}") if forced else available()[0]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use path ``name`` inside this context (in this thread or task only).

    Raises:
        CodecError: If this machine does not support the path.
    """
    token = _forced.set(_checked(name, "using()"))
    try:
        yield
    finally:
        _forced.reset(token)


def describe() -> str:
    """Describe the active path and the reason for it."""
    chosen = path()
    why = "forced by " + VARIABLE if os.environ.get(VARIABLE) else _reason(chosen)
    words = {
        "avx512": "native code for AVX-512",
        "avx2": "native code for AVX2",
        "scalar": "native code without vector instructions",
        "torch": "torch reference",
    }[chosen]
    return f"{words} ({why}; available: {', '.join(available())})"


@functools.cache
def _paths(features: int | None) -> tuple[str, ...]:
    if features is None:
        return ("torch",)
    there = {"avx512": bool(features & native.HAS_AVX512), "avx2": bool(features & native.HAS_AVX2)}
    return tuple(name for name in PATHS if there.get(name, True))


def _reason(chosen: str) -> str:
    if chosen == "torch":
        return native.absence()
    features = native.features() or 0
    if chosen == "avx512":
        further = (("VPOPCNTDQ", native.HAS_VPOPCNTDQ), ("VBMI and VNNI", native.HAS_VBMI))
        words = (f"{'with' if features & bit else 'without'} {name}" for name, bit in further)
        return f"the best instruction set of this processor, {', '.join(words)}"
    return "the best instruction set of this processor"


def _checked(name: str, source: str) -> str:
    if name in available():
        return name
    if name not in PATHS:
        raise CodecError(f"{source}: unknown kernel path {name!r} (known: {', '.join(PATHS)})")
    lack = native.absence() if native.features() is None else "this processor lacks the instructions"
    raise CodecError(
        f"{source}: kernel path {name!r} is not available: {lack} (available: {', '.join(available())})"
    )
