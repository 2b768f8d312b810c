"""The places of a vLLM model at which variants add their terms, and the contents of each slot there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gym_quant import CodecError
from gym_quant.kernels import SignMatrix
from torch import Tensor

from gym_fed.serving.vllm_plugin.slots import (
    DeviceLayer,
    HostLayer,
    LayerSlots,
    StepSlots,
    VectorSlots,
    sliced,
)
from gym_fed.serving.vllm_plugin.variants import EMBEDDING, PluginVariant


@dataclass(frozen=True)
class Shard:
    """The part of a full matrix that a layer of this rank holds.

    Attributes:
        rows: The outputs in it.
        cols: The inputs in it.
        full: The shape of the full matrix.
    """

    rows: slice
    cols: slice
    full: tuple[int, int]


@dataclass(frozen=True)
class LinearPlace:
    """A linear layer: its parts (query, key and value), and the deltas that are added to it.

    Attributes:
        parts: The names of the base's modules, in the order of the outputs.
        shards: The shard of each part.
        slots: The sign matrices.
        bias: The deltas of the bias; None for a layer without bias.
        adds_bias: True if this rank adds the bias.
    """

    parts: tuple[str, ...]
    shards: tuple[Shard, ...]
    slots: HostLayer | DeviceLayer
    bias: VectorSlots | None
    adds_bias: bool = True


@dataclass(frozen=True)
class NormPlace:
    """A norm: its weight, and the factor ``(w + delta) / w`` of each slot."""

    weight: Tensor
    factors: VectorSlots


Prepared = Mapping[str, Any]
"""The parts of a variant in the form that each place takes, by the place's name."""


class Wiring:
    """The places of a model at which variants add their terms.

    Args:
        step: The slots of the current step.
        num_slots: The number of slots.
        kernel: The CPU kernel of sign deltas.
        tied: True if the head has the embedding's weights.
        device: The device of the model.
    """

    def __init__(
        self, step: StepSlots, num_slots: int, kernel: str, tied: bool, device: torch.device
    ) -> None:
        self.step = step
        self.linears: dict[str, LinearPlace] = {}
        self.norms: dict[str, NormPlace] = {}
        self.tables: dict[str, HostLayer | DeviceLayer] = {}
        """Embedding and head, which every rank holds in full."""
        self._num_slots, self._kernel, self._tied, self._device = num_slots, kernel, tied, device

    def new_layer(self, sizes: Sequence[int], cols: int) -> HostLayer | DeviceLayer:
        """Create the slots of a layer for the model's device."""
        if self._device.type == "cpu":
            return HostLayer(sizes, cols, self._num_slots, self._kernel)
        return DeviceLayer(sizes, cols, self._num_slots, self._device)

    def add_linear(
        self, name: str, parts: Sequence[str], shards: Sequence[Shard], *, bias: bool, adds_bias: bool
    ) -> LinearPlace:
        """Register a linear layer, or the packed form of several."""
        sizes = [shard.rows.stop - shard.rows.start for shard in shards]
        cols = shards[0].cols.stop - shards[0].cols.start
        biases = VectorSlots(sum(sizes), self._num_slots, 0.0, self._device) if bias else None
        layer = self.new_layer(sizes, cols)
        place = LinearPlace(tuple(parts), tuple(shards), layer, biases, adds_bias)
        self.linears[name] = place
        return place

    def add_norm(self, name: str, weight: Tensor) -> NormPlace:
        """Register a norm."""
        factors = VectorSlots(weight.shape[0], self._num_slots, 1.0, self._device)
        self.norms[name] = NormPlace(weight, factors)
        return self.norms[name]

    def add_table(self, name: str, rows: int, cols: int) -> HostLayer | DeviceLayer:
        """Register the embedding or the head."""
        self.tables[name] = self.new_layer([rows], cols)
        return self.tables[name]

    def prepare(self, variant: PluginVariant) -> Prepared:
        """Convert a variant to the form that each place takes, and check its contents.

        Raises:
            ValueError: With the first module that the model lacks or that does not fit.
        """
        prepared: dict[str, Any] = {}
        seen: set[str] = set()
        for name, place in self.linears.items():
            parts = [self._part(place, number, variant) for number in range(len(place.parts))]
            bias = self._bias(place, variant)
            prepared[name] = parts, bias
            seen |= set(place.parts)
        for name, norm in self.norms.items():
            prepared[name] = _factor(name, norm, variant.norms.get(name))
            seen.add(name)
        for name, table in self.tables.items():
            source = EMBEDDING if self._tied else name
            matrix = variant.signs.get(source)
            prepared[name] = None if matrix is None else _checked(source, table, 0, matrix)
            seen.add(name)
        for module in (*variant.signs, *variant.factors, *variant.norms, *variant.biases):
            if module not in seen:
                raise ValueError(f"the model has no layer {module!r} to which a delta can be added")
        return prepared

    def activate(self, slot: int, prepared: Prepared | None) -> None:
        """Put a variant into a slot, or empty it for None."""
        for name, place in self.linears.items():
            parts, bias = prepared[name] if prepared is not None else ([None] * len(place.parts), None)
            place.slots.put(slot, parts)
            if place.bias is not None:
                place.bias.put(slot, bias)
        for name, norm in self.norms.items():
            norm.factors.put(slot, None if prepared is None else prepared[name])
        for name, table in self.tables.items():
            table.put(slot, [None if prepared is None else prepared[name]])

    def _part(self, place: LinearPlace, number: int, variant: PluginVariant) -> object | None:
        name, shard = place.parts[number], place.shards[number]
        matrix = variant.signs.get(name)
        if matrix is None:
            return None
        if (matrix.rows, matrix.cols) != shard.full:
            raise ValueError(f"{name}: the delta is {[matrix.rows, matrix.cols]}, not {list(shard.full)}")
        try:
            own = sliced(matrix, shard.rows, shard.cols)
        except CodecError as error:
            raise ValueError(f"{name}: {error}") from error
        return _checked(name, place.slots, number, own)

    def _bias(self, place: LinearPlace, variant: PluginVariant) -> Tensor | None:
        biases = [variant.biases.get(name) for name in place.parts]
        if all(bias is None for bias in biases):
            return None
        if place.bias is None:
            raise ValueError(f"{', '.join(place.parts)}: the model has no bias to which a delta can be added")
        if not place.adds_bias:
            return None
        return torch.cat(list(_bias_rows(place, biases)))


def _bias_rows(place: LinearPlace, biases: Sequence[Tensor | None]) -> Iterator[Tensor]:
    for name, shard, bias in zip(place.parts, place.shards, biases, strict=True):
        if bias is None:
            yield torch.zeros(shard.rows.stop - shard.rows.start)
        elif len(bias) != shard.full[0]:
            raise ValueError(f"{name}: the delta of the bias has {len(bias)} elements, not {shard.full[0]}")
        else:
            yield bias[shard.rows]


def _factor(name: str, norm: NormPlace, delta: Tensor | None) -> Tensor | None:
    """Return ``(w + delta) / w``, by which the norm's own output is multiplied."""
    if delta is None:
        return None
    weight = norm.weight.detach().to("cpu", torch.float32)
    if weight.shape != delta.shape:
        raise ValueError(f"{name}: the delta has {len(delta)} elements, not {len(weight)}")
    if bool(((weight == 0) & (delta != 0)).any()):
        raise ValueError(f"{name}: a weight is 0, so its delta cannot be applied as a factor")
    return torch.where(weight == 0, 1.0, (weight + delta) / weight)


def _checked(name: str, layer: LayerSlots, part: int, matrix: SignMatrix) -> object:
    try:
        return layer.prepare(part, matrix)
    except CodecError as error:
        raise ValueError(f"{name}: {error}") from error
