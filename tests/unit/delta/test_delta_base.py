"""The digest of a base and the description that deltas are checked against."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import torch
from torch import nn

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors, tensors_digest


def tensors() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4)}


def test_the_digest_is_the_same_for_the_same_tensors_in_any_order() -> None:
    given = tensors()
    assert tensors_digest(given) == tensors_digest(dict(reversed(given.items())))


def test_the_digest_is_what_its_description_says() -> None:
    digest = hashlib.sha256()
    for head, values in (
        (b'["a","float32",[4]]', [1.0] * 4),
        (b'["b","float32",[2,3]]', [0.0, 1, 2, 3, 4, 5]),
    ):
        digest.update(struct.pack("<Q", len(head)) + head + struct.pack(f"<{len(values)}f", *values))
    assert tensors_digest(tensors()) == f"sha256:{digest.hexdigest()}"


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.arange(6.0).reshape(3, 2), "a": torch.ones(4)},
        {"b": torch.arange(6.0).reshape(2, 3), "c": torch.ones(4)},
        {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4).double()},
        {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4), "c": torch.ones(0)},
        {"b": torch.arange(6.0).reshape(2, 3), "a": -torch.ones(4)},
        {"b": torch.arange(6.0).reshape(2, 3)},
    ],
)
def test_name_shape_dtype_and_every_value_are_in_the_digest(other: dict[str, torch.Tensor]) -> None:
    assert tensors_digest(other) != tensors_digest(tensors())


def test_layout_in_memory_is_not_in_the_digest() -> None:
    turned = {**tensors(), "b": torch.arange(6.0).reshape(2, 3).T.contiguous().T}
    assert not turned["b"].is_contiguous()
    assert tensors_digest(turned) == tensors_digest(tensors())


def test_half_precision_has_a_digest() -> None:
    half = {"a": torch.ones(3, dtype=torch.bfloat16)}
    assert tensors_digest(half) != tensors_digest({"a": torch.ones(3)})


def test_tied_parameters_count_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    assert list(model_tensors(model)) == ["embed.weight"]
    assert BaseSpec.of(model, "tied").num_parameters == 15


def test_a_description_survives_json() -> None:
    spec = BaseSpec.of(tensors(), "tiny")
    assert spec.shapes == {"a": (4,), "b": (2, 3)}
    assert BaseSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    "data", [{}, {"model_name": "x", "digest": "y", "shapes": [1]}, {"shapes": {"a": 1}}]
)
def test_a_malformed_description_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(GymError) as caught:
        BaseSpec.from_dict(data)
    assert caught.value.code is ErrorCode.MODEL_INVALID
