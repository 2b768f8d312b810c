"""The codec registry: every module of ``gym_quant/codecs`` that holds a ``Codec`` class is a member."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil

import gym_quant.codecs
from gym_quant.codec import Codec, CodecError


def codec_names() -> tuple[str, ...]:
    """Names of all codecs, sorted."""
    return tuple(sorted(_codecs()))


def get_codec(name: str) -> Codec:
    """The codec called ``name``.

    Raises:
        CodecError: When there is none.
    """
    try:
        return _codecs()[name]
    except KeyError:
        raise CodecError(f"unknown codec {name!r} (known: {', '.join(codec_names())})") from None


@functools.cache
def _codecs() -> dict[str, Codec]:
    found: dict[str, Codec] = {}
    for info in pkgutil.iter_modules(gym_quant.codecs.__path__):
        module = importlib.import_module(f"gym_quant.codecs.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Codec) and member.__module__ == module.__name__:
                if member.name in found:
                    raise TypeError(
                        f"two codecs are called {member.name!r}: {member} and {found[member.name]}"
                    )
                found[member.name] = member()
    return found
