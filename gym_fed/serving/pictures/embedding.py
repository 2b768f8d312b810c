"""Compute what a model puts into its language model for a medium, by running its own forward up to there.

The forward of a model that reads media embeds the prompt, replaces the embeddings of a medium's tokens, computes their
positions, and calls its language model. A hook keeps the arguments of this call and ends the forward. So no class needs
code of its own: embeddings, positions in three dimensions (M-RoPE) and features that are added after the first layers
(Qwen3-VL) are those of transformers. What goes into the language model in another way is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.processor import ProcessedPicture

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.serving.forward.chunk import Position

_PER_TOKEN = ("attention_mask", "token_type_ids", "mm_token_type_ids")
_KNOWN = frozenset(
    (
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"),
        *("visual_pos_masks", "deepstack_visual_embeds"),
    )
)
"""Tensors that a language model is given, and that steps know of."""


@dataclass(frozen=True, eq=False)
class Embedded:
    """What replaces the embeddings of a medium's tokens.

    Attributes:
        places: The tokens whose embeddings are replaced, by their number in the run.
        features: ``[places, hidden * (1 + n)]``; see ``PlacedPicture.features``.
        positions: The positions of all tokens and of the one behind them; see ``PlacedPicture.positions``.
    """

    places: list[int]
    features: Tensor
    positions: list[Position] | None


class _Reached(Exception):
    """The forward has reached the language model."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


class MediumEmbedder:
    """Embeds media with one model, from any thread, beside the engine's steps.

    Args:
        model: The model; it gets a hook that acts only in a thread that embeds a medium. Its weights are only read.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._thread = threading.local()
        self._hook = model.get_decoder().register_forward_pre_hook(self._before, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def embed(self, processed: ProcessedPicture) -> Embedded:
        """Compute the embeddings of a medium.

        Raises:
            GymError: ``INTERNAL`` if the model does not take the processor's input; ``MODEL_INVALID`` if media go into
                its language model in a way that steps do not know.
        """
        import torch

        from gym_fed.serving.forward.trial import tokens

        weights = self._model.get_input_embeddings().weight
        ids = torch.tensor([processed.run], device=weights.device)
        start, length = len(processed.before), len(processed.run)
        behind = processed.behind or tokens(len(weights))[:1]
        with torch.inference_mode():
            given = self._reach(whole_inputs(self._model, processed, processed.before, behind))
            plain = self._model.get_input_embeddings()(ids)[0]
            embeds = given["inputs_embeds"][0, start : start + length]
        _require_known(given, length)
        positions = _positions(given.get("position_ids"), start, start + length + 1)
        places = (embeds != plain).any(dim=-1).nonzero()[:, 0].tolist()
        features = [embeds[places], *(given.get("deepstack_visual_embeds") or ())]
        return Embedded(places, torch.cat(features, dim=-1).clone(), positions)

    def _reach(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._thread.embeds = True
        try:
            self._model(**inputs, use_cache=False)
        except _Reached as reached:
            return reached.given
        except (ValueError, TypeError, RuntimeError) as error:
            raise GymError(
                ErrorCode.INTERNAL,
                f"the model does not take its processor's input: {str(error)[:200]}",
                "the model's config.json and processor_config.json do not fit each other: restore them",
            ) from error
        finally:
            self._thread.embeds = False
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(self._model).__name__} does not call its language model as a module",
            "serve it with transformers or vLLM",
        )

    def _before(self, _module: Any, _args: Any, given: dict[str, Any]) -> None:
        if getattr(self._thread, "embeds", False):
            raise _Reached(given)


def whole_inputs(
    model: Any, processed: ProcessedPicture, before: Sequence[int], behind: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments of the model's forward for a prompt with one medium between texts."""
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


def _require_known(given: dict[str, Any], length: int) -> None:
    """Refuse media that reach the language model by more than embeddings, positions and known features."""
    import torch

    other = [k for k, v in given.items() if k not in _KNOWN and isinstance(v, torch.Tensor | list | tuple)]
    masks = given.get("attention_mask")
    for mask in masks.values() if isinstance(masks, dict) else [masks]:
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and _looks_ahead(mask[0, 0], length):
            other.append("a mask by which its tokens attend to each other in both directions")
    if other:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"its language model is given {other[0]} besides embeddings",
            "serve it with transformers or vLLM",
        )


def _looks_ahead(mask: Any, length: int) -> bool:
    import torch

    allowed = mask if mask.dtype == torch.bool else mask == 0
    ahead = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return bool((allowed[-length:, :length] & ahead).any())


def _positions(ids: Any, start: int, stop: int) -> list[Position] | None:
    """Return the positions of tokens in three dimensions, relative to the first; None for others."""
    if ids is None or ids.ndim != 3:
        return None
    triples = ids[-3:, 0, start:stop].T
    return [(int(t), int(h), int(w)) for t, h, w in (triples - triples[0].min()).tolist()]
