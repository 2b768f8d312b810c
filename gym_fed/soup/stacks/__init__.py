"""One tensor of every update of a round: as packed signs, as LoRA factors, or decoded block by block."""

from __future__ import annotations

from collections.abc import Sequence

from gym_quant.codec import VALUES, MergeForm
from gym_quant.registry import get_codec

from gym_fed.config.soup import MERGE_VERSION
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.manifest import TensorRecord
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import DecodedStack
from gym_fed.soup.stacks.factors import FactorStack
from gym_fed.soup.stacks.signs import SignStack

_STACKS: dict[str, type[SignStack] | type[FactorStack] | type[DecodedStack]] = {
    "signs": SignStack,
    "factors": FactorStack,
    "values": DecodedStack,
}


def form_of(record: TensorRecord, version: int = MERGE_VERSION) -> MergeForm:
    """What a merge of a version reads of a tensor, as its codec says."""
    form = get_codec(record.codec).merge_form(record.shape, record.params)
    return form if form.since <= version else VALUES


def stack_of(
    name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...], version: int = MERGE_VERSION
) -> Stack:
    """The tensor of all updates (those without it count as zero): in the one form that they have, else decoded."""
    forms = {form_of(update.record(name), version) for update in updates if name in update}
    form = forms.pop() if len(forms) == 1 else VALUES
    return _STACKS[form.kind](name, updates, shape, version)


def stacks_of(updates: Sequence[DeltaFile], spec: BaseSpec, version: int = MERGE_VERSION) -> list[Stack]:
    """Every tensor of the base that an update holds, by name."""
    held = {name for update in updates for name in update.names}
    return [stack_of(name, updates, tuple(spec.shapes[name]), version) for name in sorted(held)]
