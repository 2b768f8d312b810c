"""Codecs for weight deltas. The package depends only on torch, numpy and its own kernels.

    codec = get_codec("bitdelta")
    encoded = codec.encode(tuned - base, group_size=128)
    restored = codec.decode(encoded.payload, tuned.shape, encoded.params)

A codec is one file in ``gym_quant/codecs``, or an entry point of another package (``gym_quant.registry``). Names
are imported on first use, so that reading a config does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_quant.codec import Codec, CodecError, Encoded, Params, Payload
    from gym_quant.registry import codec_names, get_codec

__all__ = ["Codec", "CodecError", "Encoded", "Params", "Payload", "codec_names", "get_codec"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gym_quant' has no attribute {name!r}")
    from gym_quant import codec, registry

    return getattr(registry if name in ("codec_names", "get_codec") else codec, name)
