"""Codecs whose deltas are multiples of a power of two, so that deltas can be added as integers."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from gym_quant.codec import Codec, Encoded, Params, Payload, Shape
from gym_quant.grid import Integers


class IntegerCodec(Codec):
    """A codec whose deltas can be added as integers; it encodes tensors of any size."""

    adds_up = True
    for_small = True

    @abstractmethod
    def integers(self, payload: Payload, shape: Shape, params: Params) -> Integers | None:
        """Return the delta as integers, or None if its step is not a power of two."""

    @abstractmethod
    def encode_integers(self, codes: Tensor, exponent: int) -> Encoded:
        """Encode ``2**exponent`` times int64 ``codes`` exactly.

        Raises:
            CodecError: For an exponent out of range.
        """

    @abstractmethod
    def encode_within(self, tensor: Tensor, error: float) -> Encoded:
        """Encode a delta with the coarsest step tried whose relative L2 error is at most ``error`` (above 0).

        Raises:
            CodecError: If no step is fine enough.
        """

    @abstractmethod
    def exponent_of(self, delta: Tensor, previous: int | None = None) -> int:
        """Return the exponent of a delta's step, given the previous round's; ``encode`` accepts it."""
