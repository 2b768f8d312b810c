"""Describe the base model of a delta: tensor names and shapes, and the digest of their bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gym_fed.base.modeling.tensor_files import tensor_head
from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:  # a hub describes its base without loading torch
    from torch import Tensor, nn

_HEADS = ("lm_head.weight", "embed_out.weight")
Tensors: TypeAlias = "Mapping[str, Tensor]"


def model_tensors(model: nn.Module | Tensors) -> dict[str, Tensor]:
    """Return the parameters of a model, sorted by name; tied ones once. Buffers are not trained, so not included."""
    named = model.items() if isinstance(model, Mapping) else model.named_parameters()
    return {name: tensor.detach() for name, tensor in sorted(named)}


def checked_tensors(model: nn.Module | Tensors, spec: BaseSpec, what: str) -> dict[str, Tensor]:
    """Return the parameters of ``model``, checked against ``spec``.

    Args:
        model: Module, or its tensors by name.
        spec: The base.
        what: Name of the model in messages, such as "tuned".

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first tensor that differs.
    """
    tensors = model_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != spec.shapes:
        different = [n for n in shapes.keys() | spec.shapes.keys() if shapes.get(n) != spec.shapes.get(n)]
        _require_tied_alike(model, different, shapes, what)
        name = min(different)
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"tensor {name!r} has shape {shapes.get(name)} in the {what} model, but "
            f"{spec.shapes.get(name)} in the description of {spec.model_name!r}",
            "use models of the same architecture and vocabulary",
        )
    return tensors


def _require_tied_alike(
    model: nn.Module | Tensors, different: Sequence[str], shapes: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Explain the usual cause of one missing or extra tensor: the head is tied in only one of the models.

    Raises:
        GymError: ``BASE_MISMATCH``.
    """
    if len(different) != 1 or not different[0].endswith(_HEADS):
        return
    name = different[0]
    if name in shapes:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"the {what} model has its own output head ({name}), but the base's is tied to its "
            "embeddings: a delta of this base cannot include it",
            "do not adapt lm_head or the embeddings alone, or export the whole model: "
            "gym export --format huggingface",
        )
    raise GymError(
        ErrorCode.BASE_MISMATCH,
        f"the output head of the {what} model is tied to its embeddings, but the base has its own ({name})",
        "use the base that it was trained from",
    )


def tensors_digest(model: nn.Module | Tensors) -> str:
    """Compute ``sha256:<hex>`` over a model's parameters.

    Hashed are, in order of name: the canonical JSON of ``[name, dtype, shape]``, its length before it as
    eight little-endian bytes, and the raw little-endian bytes of the tensor.
    """
    digest = hashlib.sha256()
    for name, tensor in model_tensors(model).items():
        _hash_tensor(digest, name, tensor)
    return f"sha256:{digest.hexdigest()}"


def digests_by_tensor(model: nn.Module | Tensors) -> dict[str, bytes]:
    """Return 16 bytes of sha256 per parameter, over its input to ``tensors_digest``, to find differences."""
    digests = {}
    for name, tensor in model_tensors(model).items():
        digest = hashlib.sha256()
        _hash_tensor(digest, name, tensor)
        digests[name] = digest.digest()[:16]
    return digests


def _hash_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    import torch

    digest.update(tensor_head(name, tensor.dtype, tensor.shape))
    if tensor.numel():
        digest.update(tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class BaseSpec:
    """The base model that a delta is checked against.

    Attributes:
        model_name: Display name of the base.
        digest: ``sha256:<hex>`` from ``tensors_digest``.
        shapes: Shape of every parameter by name.
    """

    model_name: str
    digest: str
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: nn.Module | Tensors, name: str) -> BaseSpec:
        """Describe a model; hashes all its parameters."""
        tensors = model_tensors(model)
        return cls(name, tensors_digest(tensors), {k: tuple(t.shape) for k, t in tensors.items()})

    @property
    def num_parameters(self) -> int:
        """Number of weights, counting tied ones once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"model_name": self.model_name, "digest": self.digest, "shapes": shapes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaseSpec:
        """Restore from the result of ``to_dict``.

        Raises:
            GymError: ``MODEL_INVALID`` if the data has a different form.
        """
        try:
            shapes = {str(name): tuple(int(side) for side in shape) for name, shape in data["shapes"].items()}
            return cls(str(data["model_name"]), str(data["digest"]), shapes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GymError(ErrorCode.MODEL_INVALID, f"base description is malformed: {error!r}") from error
