"""Codecs for weight deltas. Imports only torch, numpy and its own kernels.

    codec = get_codec("bitdelta")
    encoded = codec.encode(tuned - base, group_size=128)
    restored = codec.decode(encoded.payload, tuned.shape, encoded.params)

A new codec is one file in ``gym_quant/codecs``; ``codec_names()`` finds it there.
"""

from gym_quant.codec import Codec, CodecError, Encoded, Params, Payload
from gym_quant.registry import codec_names, get_codec

__all__ = ["Codec", "CodecError", "Encoded", "Params", "Payload", "codec_names", "get_codec"]
