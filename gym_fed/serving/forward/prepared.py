"""Brings a decoder into the format that it serves in, and compares what it computes before, and after it is packed.

Without a file of the base: its own weights by the decoder with those by the stock forward; then the packed weights with
those, within what the format loses; and the packed products with those of the same weights decoded, tightly. With a
file, which holds the digest of every tensor: the packed weights with the logits that were recorded when it was written.
"""

from __future__ import annotations

from torch import Tensor

from gym_fed.base.modeling.mapped import release_pages
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward import trial
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.decoder import Decoder
from gym_fed.serving.forward.packed_base import PackedBase, Packer

LOSS = {"bfloat16": 5e-2, "int8": 0.4}
"""What a format may lose of the logits' norm; measured on SmolLM2, gym-nano and random models: 4.7e-3 and 8e-2."""
MOST_LOSS = 0.7
"""Of int4, which loses up to 0.16 there, and of formats of other packages."""
SAME = 5e-3
"""Of the norm: the same weights by other kernels, or by torch. Measured, in all formats: 3.3e-4 and less."""


def prepare(
    served: trial.PackedSteps,
    decoder: Decoder,
    stock: Tensor | None,
    format: str | None,
    kept: PackedBase | None,
) -> None:
    """Compare, pack and compare.

    Args:
        served: The model, which computes by the decoder.
        decoder: In the model's own weights; packed afterwards.
        stock: Of ``trial.stock_logits``; None: computed where it is needed.
        format: None: nothing is packed.
        kept: The base's file in that format.

    Raises:
        GymError: ``MODEL_INVALID`` where logits differ.
    """
    is_there = format is not None and kept is not None and kept.open(decoder.layers_in(format))
    if stock is None and not is_there:
        with trial.in_float32(served.model):
            stock = trial.stock_logits(served.model)
    if stock is not None:
        with decoder.compared():
            trial.require_same(served, stock)
    if format is None:
        return
    decoder.pack(format, Packer() if kept is None else kept.pack)
    found = trial.step_logits(served)
    if kept is not None and kept.logits is not None:
        hint = f"delete {kept.path}: the next start packs the base anew, and compares it with its weights"
        _require(found, kept.logits, SAME, f"packed {format}, from those that its file records,", hint)
    elif stock is not None and format == served.base_format:  # the weights' own type: nothing is lost
        _require(found, stock[2:], SAME, f"packed {format}", _REPORT)
    elif stock is not None:
        _require(
            found, _decoded(served, decoder), SAME, f"packed {format}, from the decoded weights',", _REPORT
        )
        limit = LOSS.get(format, MOST_LOSS)
        _require(found, stock[2:], limit, f"packed {format}", "choose another base_format")
    for weight in served.model.parameters():
        release_pages(weight)  # of the embedding, which the comparisons read
    if kept is not None:
        kept.save(found)


_REPORT = (
    "set GYM_KERNELS=torch, which uses none of the native code, and report it with your processor's name"
)


def _decoded(served: trial.PackedSteps, decoder: Decoder) -> Tensor:
    """The same logits, from one chunk, so that every weight is decoded once."""
    with decoder.compared():
        return served.step([Chunk(trial.tokens(served.vocabulary), served.new_cache(), num_logits=3)])


def _require(found: Tensor, wanted: Tensor, limit: float, what: str, hint: str) -> None:
    off = trial.distance(found, wanted) if found.shape == wanted.shape else float("inf")
    if not off <= limit:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"the base cannot be served: its logits in {what} are off by {off:.1e} of their norm, over {limit}",
            hint,
        )
