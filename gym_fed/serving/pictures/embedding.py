"""Compute the features of media with the model's own forward pass, up to its language model, and cache them.

The forward pass of a multimodal model embeds the prompt, replaces the embeddings of a medium's tokens, computes their
positions, and calls its language model. A hook records the arguments of this call and stops the forward pass. Therefore
no model class needs its own code: embeddings, three-dimensional positions (M-RoPE) and features that are added after
the first layers (Qwen3-VL) are computed by transformers. Models that pass anything else to their language model are
refused.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.processor import Medium, ProcessedPicture

if TYPE_CHECKING:
    from gym_fed.serving.forward.chunk import Embedded, Position


_PER_TOKEN = ("attention_mask", "token_type_ids", "mm_token_type_ids")
_KNOWN = frozenset(
    (
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"),
        *("visual_pos_masks", "deepstack_visual_embeds"),
    )
)
"""The tensor arguments of a language model that the engine's steps support."""


class _Reached(Exception):
    """Raised when the forward pass reaches the language model."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


class MediumEmbedder:
    """Embeds media with one model, one at a time, in parallel with the engine's steps.

    It has its own modules, which share the model's tensors: the engine's steps put hooks on the served modules and
    replace their parameters, which must not affect the features of other requests.

    Args:
        model: The loaded model on its device, before it is served. Modules after the embeddings are left out, so that
            their tensors are freed when the served model packs them.
    """

    def __init__(self, model: Any) -> None:
        import torch

        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        if (head := model.get_output_embeddings()) is not None:
            shared[id(head)] = torch.nn.Identity()
        for layers in model.get_decoder().children():
            if isinstance(layers, torch.nn.ModuleList):
                shared[id(layers)] = torch.nn.ModuleList()
        self._model = copy.deepcopy(model, shared)
        self._model.get_decoder().register_forward_pre_hook(_stop, with_kwargs=True)

    def embed(self, processed: ProcessedPicture) -> Embedded:
        """Compute the embeddings of a medium.

        Raises:
            GymError: ``USAGE`` if the model rejects this medium; ``INTERNAL`` if its files do not match each other;
                ``MODEL_INVALID`` if the model passes media to its language model in an unsupported way.
        """
        import torch

        from gym_fed.serving.forward.chunk import Embedded
        from gym_fed.serving.forward.trial import tokens

        weights = self._model.get_input_embeddings().weight
        ids = torch.tensor([processed.run], device=weights.device)
        start, length = len(processed.before), len(processed.run)
        behind = processed.behind or tokens(len(weights))[:1]
        with torch.inference_mode():
            given = self._reach(whole_inputs(self._model, processed, processed.before, behind))
            plain = self._model.get_input_embeddings()(ids)[0]
            embeds = given["inputs_embeds"][0, start : start + length]
        _require_known(given, start, length)
        positions = _positions(given.get("position_ids"), start, start + length + 1)
        places = (embeds != plain).any(dim=-1).nonzero()[:, 0].tolist()
        features = [embeds[places], *(given.get("deepstack_visual_embeds") or ())]
        return Embedded(places, torch.cat(features, dim=-1).clone(), positions)

    def _reach(self, inputs: dict[str, Any]) -> dict[str, Any]:
        try:
            self._model(**inputs, use_cache=False)
        except _Reached as reached:
            return reached.given
        except (ValueError, IndexError, ZeroDivisionError) as error:
            raise GymError(
                ErrorCode.USAGE,
                f"the model rejects this input: {str(error)[:200]}",
                "send one with a different size or length",
            ) from error
        except (TypeError, RuntimeError) as error:
            raise GymError(
                ErrorCode.INTERNAL,
                f"the model rejects its processor's output: {str(error)[:200]}",
                "the model's config.json and processor_config.json do not match: restore them",
            ) from error
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(self._model).__name__} does not call its language model as a module",
            "serve it with transformers or vLLM",
        )


def _stop(_module: Any, _args: Any, given: dict[str, Any]) -> None:
    raise _Reached(given)


def whole_inputs(
    model: Any, processed: ProcessedPicture, before: Sequence[int], behind: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments of the model's forward pass for a prompt with one medium between two texts."""
    import torch

    weights = model.get_input_embeddings().weight
    inputs: dict[str, Any] = dict(processed.inputs)
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            inputs[key] = value.to(weights.device, weights.dtype if value.is_floating_point() else None)
    ids = [*before, *processed.run, *behind]
    inputs["input_ids"] = torch.tensor([ids], device=weights.device)
    for key in _PER_TOKEN:
        if key in inputs:
            filler = 1 if key == "attention_mask" else 0
            ends = [inputs[key].new_full((1, len(part)), filler) for part in (before, behind)]
            inputs[key] = torch.cat([ends[0], inputs[key], ends[1]], dim=1)
    return inputs


def _require_known(given: dict[str, Any], start: int, length: int) -> None:
    """Refuse a model that passes more than embeddings, positions and known features to its language model."""
    import torch

    other = [k for k, v in given.items() if k not in _KNOWN and isinstance(v, torch.Tensor | list | tuple)]
    masks = given.get("attention_mask")
    for mask in masks.values() if isinstance(masks, dict) else [masks]:
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and _looks_ahead(mask[0, 0], start, length):
            other.append("a mask with bidirectional attention")
    if other:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"its language model receives {other[0]} in addition to embeddings",
            "serve it with transformers or vLLM",
        )


def _looks_ahead(mask: Any, start: int, length: int) -> bool:
    """Return True if any of the ``length`` tokens starting at ``start`` attends to a later one of them."""
    import torch

    allowed = mask if mask.dtype == torch.bool else mask == 0
    ahead = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return bool((allowed[start : start + length, start : start + length] & ahead).any())


def _positions(ids: Any, start: int, stop: int) -> list[Position] | None:
    """Return the three-dimensional positions of tokens, relative to the first; None if the model has none."""
    if ids is None or ids.ndim != 3:
        return None
    triples = ids[-3:, 0, start:stop].T
    return [(int(t), int(h), int(w)) for t, h, w in (triples - triples[0].min()).tolist()]


CACHE_BYTES = 256 * 2**20
OWNER_BYTES = 2 * 2**30
"""Maximum size in bytes of features in one owner's requests, including waiting ones; 16 pictures may need 750 MB in an
8B model."""


class PictureEncoder:
    """Computes and caches features, one medium at a time, in parallel with the engine's steps. Thread-safe.

    Cached features are reused only for their owner.

    Args:
        embedder: The embedder that computes the features.
        cache_bytes: Maximum size in bytes of cached features.
        owner_bytes: Maximum size in bytes of features in one owner's requests that are not cached.
    """

    def __init__(
        self, embedder: MediumEmbedder, cache_bytes: int = CACHE_BYTES, owner_bytes: int = OWNER_BYTES
    ) -> None:
        self._embedder, self._limit, self._owner_limit = embedder, cache_bytes, owner_bytes
        self._used: WeakValueDictionary[tuple[str, bytes], Embedded] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], Embedded] = OrderedDict()
        self._bytes = 0
        self.computed = 0

    def features(self, picture: Medium, processed: ProcessedPicture, owner: str) -> Embedded:
        """Return the features that replace the embeddings of a picture's tokens, on the model's device.

        Args:
            picture: The picture.
            processed: The picture's tokens and model inputs.
            owner: The owner of the cached features, which are not shared: the timing would tell others what was sent.

        Raises:
            GymError: ``BUSY`` if the owner's requests have too many features; errors from ``MediumEmbedder.embed``.
        """
        key = owner, picture.digest
        with self._lock:
            if (features := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return features
            if (features := self._used.get(key)) is None:
                self._require_room(owner)
                features = self._used[key] = self._embedder.embed(processed)
                self.computed += 1
            self._keep(key, features)
            return features

    def _require_room(self, owner: str) -> None:
        used = [(key[0], each.features.nbytes) for key, each in self._used.items() if key not in self._kept]
        if sum(size for whose, size in used if whose == owner) >= self._owner_limit:
            raise GymError(
                ErrorCode.BUSY,
                "this user's requests already fill the memory for images",
                "try again when some are answered",
            )

    def _keep(self, key: tuple[str, bytes], features: Embedded) -> None:
        self._kept[key] = features
        self._bytes += features.features.nbytes
        while self._bytes > self._limit and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.features.nbytes
